"""Messages of consoles: what the daemon holds, emptying a tier, checking all that is in it."""

import msgspec

from kvstore.messages.base import Message


class Evict(Message, frozen=True, tag=True):
    """Empty these tiers ("ram", "ssd", "s3"); blocks with no copy elsewhere are kept unless `drop`. With `session_id`
    only of that session's blocks."""

    tiers: list[str]
    drop: bool = False
    session_id: str = ""


class Evicted(Message, frozen=True, tag=True):
    """Blocks freed and kept (pinned, or the only copy), by tier."""

    freed: dict[str, int]
    kept: dict[str, int]


class Verify(Message, frozen=True, tag=True):
    """Begin to walk over these tiers ("ssd", "s3"; none named: all there are) and check everything in them.

    `repair` deletes what is damaged, `drop_wrong_key` what is encrypted with a key that the daemon does not have.
    Answered, as the next two are, by VerifyReport at once.
    """

    tiers: list[str]
    repair: bool = False
    drop_wrong_key: bool = False


class VerifyStatus(Message, frozen=True, tag=True): ...


class VerifyCancel(Message, frozen=True, tag=True): ...


class ScrubFinding(msgspec.Struct, frozen=True):
    """Something that is not as it should be, in the words of `tiers/scrub.py`."""

    verdict: str
    area: str
    name: str
    why: str
    is_removed: bool


class ScrubReport(msgspec.Struct, frozen=True):
    """The walk over one tier. `counts` is by area ("blocks", "records", "slots", "files") and verdict; `examples` are
    the first few findings of each verdict. `removed` is by area. `total` is how many blocks there are,
    where that is known beforehand.

    `state` is "running", "done", "cancelled" or "failed": the tier stopped answering.
    """

    counts: dict[str, dict[str, int]] = {}
    examples: list[ScrubFinding] = []
    removed: dict[str, int] = {}
    num_seen: int = 0
    num_bytes: int = 0
    total: int | None = None
    seconds: float = 0.0
    state: str = "running"


class VerifyReport(Message, frozen=True, tag=True):
    """By tier; of the last verification where none is running."""

    is_running: bool
    tiers: dict[str, ScrubReport]


class Stats(Message, frozen=True, tag=True): ...


class StatsReply(Message, frozen=True, tag=True):
    """The snapshot that `kvstore stats --json` prints; its form is documented in docs/stats.md."""

    stats: dict[str, object]
