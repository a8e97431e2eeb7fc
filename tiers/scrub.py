"""Walking over everything a tier holds to see whether it is whole: the words for what is found, and its sum.

Covers: what both slow tiers share, and the walk over records. The walks over blocks are in `tiers/ssdscrub.py` and
`tiers/s3scrub.py`. A walk is an iterator of small steps, so that whoever drives it decides how fast it goes and where
it ends.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from kvstore.core.errors import CorruptBlock, KVStoreError, WrongKey
from kvstore.core.key import BlockKey


class Verdict(StrEnum):
    """What was found of one thing."""

    OK = "ok"
    CORRUPT = "corrupt"  # the bytes are not what was stored
    MISSING = "missing"  # it should be there and the medium does not give it back
    WRONG_KEY = "wrong_key"  # whole, but encrypted with a key that is not here, or not encrypted where it must be
    ORPHANED = "orphaned"  # it takes up room and nothing names it
    FOREIGN = "foreign"  # not ours


BAD: Final = (Verdict.CORRUPT, Verdict.MISSING, Verdict.ORPHANED)
"""What a repair deletes."""
MAX_EXAMPLES: Final = 5
"""So many findings of each verdict are kept by name."""
_RECORDS_PER_STEP = 16


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to be done with what is found. `repair` deletes what is BAD, `drop_wrong_key` what no key here opens."""

    repair: bool = False
    drop_wrong_key: bool = False

    def remove(self, verdict: Verdict) -> bool:
        return (self.repair and verdict in BAD) or (self.drop_wrong_key and verdict is Verdict.WRONG_KEY)


@dataclass(frozen=True, slots=True)
class Finding:
    """Anything but OK. `area` is "blocks", "records", "slots" or "files"; `why` is for people and holds no secret."""

    verdict: Verdict
    area: str
    name: str
    why: str = ""
    is_removed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A moment of a walk: `num_ok` things of `area` are whole, `findings` are the others.

    `lost` are blocks that were removed. `total` is how many things the whole walk sees, where that is known.
    """

    area: str
    num_ok: int = 0
    findings: tuple[Finding, ...] = ()
    num_bytes: int = 0
    lost: tuple[BlockKey, ...] = ()
    total: int | None = None


@dataclass(slots=True)
class Tally:
    """The sum of the steps so far."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By area and verdict."""
    examples: list[Finding] = field(default_factory=list)
    num_seen: int = 0
    num_bytes: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    """By area."""
    total: int | None = None

    def add(self, step: Step) -> None:
        self._count(step.area, Verdict.OK, step.num_ok)
        for finding in step.findings:
            self._count(finding.area, finding.verdict, 1)
            if finding.is_removed:
                self.removed[finding.area] = self.removed.get(finding.area, 0) + 1
            if sum(known.verdict is finding.verdict for known in self.examples) < MAX_EXAMPLES:
                self.examples.append(finding)
        self.num_bytes += step.num_bytes
        self.total = self.total if step.total is None else step.total

    def _count(self, area: str, verdict: Verdict, number: int) -> None:
        if number:
            of_area = self.counts.setdefault(area, {})
            of_area[verdict.value] = of_area.get(verdict.value, 0) + number
            self.num_seen += number


class ScrubbedTier(Protocol):
    """A tier that can be walked over while it serves."""

    def scrub(self, orders: Orders, parallel: int = 1) -> Iterator[Step]:
        """Look at everything; each step reads at most a few MiB, or one block. `parallel`: so many requests may be made
        at once. Raises TierUnavailable where the medium fails as a whole. May be left at any step."""
        ...


@dataclass(frozen=True, slots=True)
class Inspected:
    """A record as it lies there, with its present tag; `fault` is what stands against reading it."""

    etag: str
    num_bytes: int
    fault: KVStoreError | None


class InspectedRecords(Protocol):
    """What a walk needs of a record store."""

    def names(self, prefix: str) -> Iterator[str]: ...

    def inspect(self, name: str) -> Inspected | None:
        """Read and check one record, decrypting it where the key is here; None where it is gone."""
        ...

    def delete_unchanged(self, name: str, etag: str) -> bool:
        """Delete the record unless it was written meanwhile; return whether it is gone."""
        ...


def scrub_records(records: InspectedRecords, names: Iterable[str], orders: Orders) -> Iterator[Step]:
    """Walk over the records of these names. Raises TierUnavailable."""
    num_ok, num_bytes = 0, 0
    findings: list[Finding] = []
    for name in names:
        found = records.inspect(name)
        if found is None:
            continue
        num_bytes += found.num_bytes
        verdict = verdict_of(found.fault)
        if verdict is Verdict.OK:
            num_ok += 1
        else:
            is_removed = orders.remove(verdict) and records.delete_unchanged(name, found.etag)
            findings.append(Finding(verdict, "records", name, str(found.fault), is_removed))
        if num_ok + len(findings) >= _RECORDS_PER_STEP:
            yield Step("records", num_ok, tuple(findings), num_bytes)
            num_ok, num_bytes, findings = 0, 0, []
    yield Step("records", num_ok, tuple(findings), num_bytes)


def fault_of(check: Callable[[], object]) -> KVStoreError | None:
    """Return the CorruptBlock or WrongKey that a check raises, None where it passes."""
    try:
        check()
    except (CorruptBlock, WrongKey) as error:
        return error
    return None


def verdict_of(fault: KVStoreError | None) -> Verdict:
    if fault is None:
        return Verdict.OK
    return Verdict.WRONG_KEY if isinstance(fault, WrongKey) else Verdict.CORRUPT
