"""Messages about blocks: an engine joins, asks what is there, takes it and brings it."""

import msgspec

from kvstore.core.outcome import Outcome
from kvstore.messages.base import Message

# --------------------------------------------------------------- attach


class NamespaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace as far as the daemon needs it; `label` is for people (model name), `digest` decides."""

    digest: bytes
    root: bytes
    label: str
    block_tokens: int
    block_bytes: int


class Ping(Message, frozen=True, tag=True): ...


class Pong(Message, frozen=True, tag=True):
    epoch: int


class Attach(Message, frozen=True, tag=True):
    """Join as an engine. `liveness_file` is the name (no '/') of a file in the run folder's `clients/` that the engine
    holds an exclusive flock on for as long as it lives."""

    namespace: NamespaceSpec
    liveness_file: str
    name: str = ""


class Attached(Message, frozen=True, tag=True):
    """`region_path` is to be mapped shared, `region_bytes` long, as described in `tiers/region.py`. `wants_tokens`: a
    Store may say the token ids of its blocks."""

    epoch: int
    incarnation: int
    region_path: str
    region_bytes: int
    tiers: list[str]
    wants_tokens: bool = False


class Detach(Message, frozen=True, tag=True):
    """Leave; every lease and grant of this incarnation ends."""


class Done(Message, frozen=True, tag=True):
    """The plain 'yes' to a request that has nothing more to say."""


class Error(Message, frozen=True, tag=True):
    """The request was refused as a whole; nothing was done."""

    code: str
    message: str


# --------------------------------------------------------------- lookup and fetch


class Lookup(Message, frozen=True, tag=True):
    """Which leading blocks exist? `keys` are joined block keys of one prefix, from its first block on."""

    keys: bytes


class Found(Message, frozen=True, tag=True):
    """`tiers[i]` is the fastest TierKind that holds block i, for the leading blocks that exist; the block
    after those answers `next` (an Outcome: MISS, PENDING, UNKNOWN; OK where all exist).

    `why` says of a MISS what became of the block, where that is known: "evicted", "corrupt", "never_stored" …
    `s3` is UNKNOWN where the bucket might have that block and has not been asked yet: it will be, so another lookup
    a moment later may find more. Nothing waits for the bucket here.
    """

    tiers: bytes
    next: int
    why: str = ""
    s3: int = int(Outcome.MISS)


class Fetch(Message, frozen=True, tag=True):
    """Bring these blocks into slots and pin them. Answered by Landed messages until one says `done`.

    `deadline_s` counts from receipt; what has not landed by then answers TIMED_OUT.
    """

    keys: bytes
    deadline_s: float


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One block's place in this fetch or store: `index` into the request's keys, what became of it, and,
    where that is OK, `offset` into the region and the `generation` that the slot must still show afterwards.
    `source` is the TierKind that served it."""

    index: int
    outcome: int
    offset: int = 0
    generation: int = 0
    source: int = 0


class Landed(Message, frozen=True, tag=True):
    """Some more blocks of a fetch. Their pins are held until Release, Detach or the engine's death.

    `lease` is the same in all messages of one fetch.
    """

    lease: int
    slots: list[Slot]
    done: bool


class Release(Message, frozen=True, tag=True):
    """End the pins of these blocks of a fetch (indexes into its keys); without `indexes` give up the whole fetch: all
    pins end, what has not landed is cancelled. `stale` counts slots whose generation had changed under the copy.

    Releasing what is not pinned (any more) is not an error.
    """

    lease: int
    indexes: list[int] | None = None
    stale: int = 0


class Damaged(Message, frozen=True, tag=True):
    """These blocks came whole from `source` (a TierKind), as far as the daemon can tell, but are not what an engine had
    stored: they failed the checksum that it keeps with its blocks. Their copies in RAM and down to `source` go, so that
    one further away is asked for the next time, or they can be stored again. Those in use stay, for their readers to
    find out. Answered by Done."""

    keys: bytes
    source: int


# --------------------------------------------------------------- store


class Store(Message, frozen=True, tag=True):
    """Ask for slots for new blocks: `keys` are consecutive blocks of one prefix, `parent` the key before the first
    (the root for depth 0), `depth` the first one's index in the prefix. `tokens` are the blocks' token ids as
    little-endian uint32, joined, or b"": the daemon tells them to routers, if it publishes events, and keeps them
    nowhere but in memory."""

    keys: bytes
    parent: bytes
    depth: int
    tokens: bytes = b""


class Granted(Message, frozen=True, tag=True):
    """Per key: OK with a slot to write to, or EXISTS, PENDING, BUSY, FULL … A grant lasts as long as its engine.

    `retry_s` is a hint for BUSY ones.
    """

    slots: list[Slot]
    retry_s: float = 0.0


class Commit(Message, frozen=True, tag=True):
    """The bytes of these granted slots are complete. `written[i]` false gives the slot back unwritten."""

    keys: bytes
    generations: list[int]
    written: list[bool]


class Committed(Message, frozen=True, tag=True):
    """Per key: OK once the block is readable, STALE where the grant is not (any more) this engine's."""

    outcomes: bytes
