"""The SSD tier: payloads in preallocated segment files, and beside them an LMDB index that alone decides what exists.

    path/lock             held while a process has the tier open
    path/index.mdb        block -> place (`tiers/index.py`)
    path/records.mdb      session records (`tiers/records.py`)
    path/segments/*.seg   headers and payloads (`tiers/segments.py`, `tiers/pieces.py`)

Write: header and payload to free slots, one fdatasync per segment touched, then one index transaction, synced; only
then OK. So a block that the index names is complete, whatever moment the process is killed at, and a block that a
crash cut short is a free slot. Read: one direct read, then header, checksum and index must agree.
Delete: the index transaction first; its slots are reused only after that is durable and no older read is running.
Everything below `path` counts against `max_bytes`, index and records with the size they may grow to, and no segment
is added while the file system has less than `min_free_bytes` left (`tiers/space.py`).
"""

import contextlib
import errno
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvstore.core.block import BlockMeta
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.aligned import AlignedBuffers
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths
from tiers.calls import RunningCalls
from tiers.codec import PLAIN, Codec
from tiers.columns import Columns, joined
from tiers.crew import Crew
from tiers.direct import record_size
from tiers.dirlock import FolderLock, own_folder
from tiers.emptying import Emptier
from tiers.environment import DamagedEnvironment, sync_folder
from tiers.faults import FaultCounter
from tiers.footing import Footing
from tiers.index import IndexEntry, IndexFull, Place
from tiers.ledger import Ledger
from tiers.otherkeys import OtherKeys
from tiers.pieces import PieceMover
from tiers.reader import BlockReader
from tiers.records import LmdbRecords
from tiers.scrub import Orders, Step
from tiers.space import MIB, DiskSpace
from tiers.ssdscrub import SsdScrub
from tiers.writer import BlockWriter

_CLOSE_WAIT_S = 30.0
# Beside the thread that calls: five read, one makes checksums. 3 to 8% more than four threads in all for blocks of 1 to
# 8 MiB, nothing for 32 MiB, and eight gained no more.
_IO_THREADS = 5
_SORTED_AT_ONCE = 8
_logger = logging.getLogger("kvstore.tiers.ssd")


class SsdTier:
    """Implements `tiers.base.Tier`. Thread-safe: reads run side by side and beside writes; index commits stand in line.

    `records` is a RecordStore in the same folder.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        min_free_bytes: int = 0,
        segment_bytes: int = 256 * MIB,
        max_record_bytes: int | None = None,
        lock_wait_s: float = 10.0,
        codec: Codec = PLAIN,
        huge_slots: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the folder, or make it (mode 0700), and bring it below its cap.

        `max_record_bytes` of `max_bytes` are kept for `records` (default: a sixteenth, at most 256 MiB). `codec`
        packs nothing, since all slots of a size are equal; what it encrypts is as long as before. `huge_slots`:
        payloads lie on huge pages, so that the disk may read and write them itself (`tiers/pieces.py`).
        Raises ConfigError where the limits make no sense, the folder is somebody else's, or another process has it
        beyond `lock_wait_s`, TierUnavailable where the disk fails.
        """
        self._space = DiskSpace.of(
            path,
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            max_record_bytes=max_record_bytes,
            segment_bytes=segment_bytes,
        )
        assert codec.packs_with is None
        self._codec = codec
        self._is_straight = huge_slots
        self._faults = FaultCounter("ssd", clock)
        self._calls = RunningCalls()
        self._locked: OtherKeys[IndexEntry] = OtherKeys()
        self._record_bytes = MIB
        self._trouble = ""
        with contextlib.ExitStack() as opened:
            try:
                self._open(path, opened, lock_wait_s, clock, sleep)
            except OSError as error:
                raise TierUnavailable(f"cannot open the SSD tier in {path}: {error}") from error
            self._opened = opened.pop_all()
        _logger.info("ssd tier: %d blocks in %s", self._ledger.totals()[0], path)

    @property
    def kind(self) -> TierKind:
        return TierKind.SSD

    # ------------------------------------------------------------ Tier

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._calls.enter() as is_open, self._unavailable_counted():
            if is_open:
                found = self._ledger.index.contains(keys)
                return [
                    Outcome.OK if is_in and key not in self._locked else Outcome.MISS
                    for key, is_in in zip(keys, found, strict=True)
                ]
        return [Outcome.UNAVAILABLE] * len(keys)

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        with self._calls.enter() as is_open, self._unavailable_counted():
            if is_open:
                return self._read(blocks, into)
        return [Outcome.UNAVAILABLE] * len(blocks)

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`: OK means durable. FULL, too, where the file system is at its floor."""
        check_lengths(blocks, payloads)
        with self._calls.enter() as is_open, self._unavailable_counted():
            if is_open:
                return self._write(blocks, payloads)
        return [Outcome.UNAVAILABLE] * len(blocks)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.delete`: OK means that it is durable. The room stays with the tier, for its next blocks, unless
        the file system is below its floor."""
        with self._calls.enter() as is_open, self._unavailable_counted():
            if is_open:
                removed = self._ledger.remove(keys)
                while self._space.free_bytes() < 0 and self._segments.give_way():
                    pass
                return [Outcome.MISS if entry is None else Outcome.OK for entry in removed]
        return [Outcome.UNAVAILABLE] * len(keys)

    def usage(self) -> Usage:
        """`used_bytes` is what the records of the blocks take up; `capacity_bytes` what they could, at the size of
        those written last, and with what the file system has left now."""
        return Usage(*self._ledger.totals(), self._segments.capacity_bytes(self._record_bytes))

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """As `Tier.recover_batches`; ends early, counted, where the disk fails."""
        with self._unavailable_counted():
            waiting: list[Columns] = []
            for columns in self._ledger.index.columns():
                waiting.append(columns)
                # Sorted out many at a time, so that many namespaces do not make for many small batches.
                if len(waiting) == _SORTED_AT_ONCE:
                    yield from joined(waiting).recovered()
                    waiting.clear()
            if waiting:
                yield from joined(waiting).recovered()

    def faults(self) -> dict[str, int]:
        """Return how often which fault was met since the start, the drops at opening included."""
        return self._faults.counts()

    def scrub(self, orders: Orders, parallel: int = 1) -> Iterator[Step]:
        """As `ScrubbedTier.scrub`, but always one read at a time."""
        scrub = SsdScrub(
            self._space.folder,
            self._ledger.index,
            self._segments,
            self._codec,
            self.records,
            self._ledger.drop,
            orders,
        )
        steps = scrub.steps(self._ledger.totals()[0])
        while True:
            # Entered for each step, so that whoever leaves a walk half way does not keep the tier from closing.
            with self._calls.enter() as is_open:
                if not is_open:
                    raise TierUnavailable("the SSD tier is closed")
                if why := self.needs_reopening():
                    raise TierUnavailable(why)
                try:
                    step = next(steps)
                except StopIteration:
                    return
                except (IndexFull, OSError) as error:
                    raise TierUnavailable(str(error)) from error
            yield step

    def taken_bytes(self) -> int:
        """Return what the folder takes up on the disk now, all files together: never more than `max_bytes`."""
        return self._space.taken_bytes()

    def close(self) -> None:
        """Wait for running calls, then close everything. Idempotent."""
        if self._calls.close(_CLOSE_WAIT_S):
            self._opened.close()
        else:
            _logger.error("ssd tier: calls still run after %.0f s; left open", _CLOSE_WAIT_S)

    def needs_reopening(self) -> str:
        """Look whether the folder is still what was opened; return what is wrong, "" where nothing is. What is wrong
        stays so until the tier is closed and opened again, which drops what is lost. Meanwhile it answers, but stores
        nothing."""
        if not self._trouble and (path := self._footing.displaced() or self._segments.displaced()):
            self._lose("displaced", f"{path.name} was removed or replaced")
        return self._trouble

    def check_integrity(self) -> None:
        """Assert that index, slots and counts agree. No other call may be running."""
        self._ledger.check_integrity()
        assert self._space.taken_bytes() <= self._space.max_bytes

    # ------------------------------------------------------------ opening

    def _open(
        self,
        path: Path,
        opened: contextlib.ExitStack,
        lock_wait_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        own_folder(path)
        opened.callback(FolderLock(path, wait_s=lock_wait_s, clock=clock, sleep=sleep).release)
        self._ledger = Ledger(path, self._space, self._faults)
        self._ledger.open(self._empty_segment, opened)
        self._segments = self._ledger.segments
        crew = Crew(_IO_THREADS, "ssd-io")
        opened.callback(crew.close)
        buffers = AlignedBuffers()
        mover = PieceMover(buffers, is_straight=self._is_straight)
        self._emptier = Emptier(self._segments, mover, crew, buffers)
        self._reader = BlockReader(self._segments, mover, crew, self._codec, self._faults)
        self._writer = BlockWriter(self._segments, mover, crew, self._codec)
        self.records = LmdbRecords(
            path / "records.mdb", self._space.max_record_bytes, keys=self._codec.keys, faults=self._faults
        )
        opened.callback(self.records.close)
        self._footing = Footing([path / name for name in ("lock", "index.mdb", "records.mdb")])
        # The names of new files, too, must outlive a loss of power.
        sync_folder(path)
        sync_folder(path.parent)

    def _empty_segment(self, number: int) -> None:
        """Move what a segment holds elsewhere, as far as that goes."""
        try:
            moved = self._emptier.empty(self._ledger.index, number)
        except (IndexFull, TierUnavailable, OSError) as error:
            self._faults.count("not_emptied", detail=error)
        else:
            _logger.info("ssd tier: moved %d blocks out of segment %d", moved, number)

    # ------------------------------------------------------------ reading

    def _read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        findings = self._reader.read(self._ledger.index, blocks, into)
        self._quarantine(findings.broken, reuse=True)
        # The disk may be bad there, so nothing is written to these slots before the next start.
        self._quarantine(findings.unreadable, reuse=False)
        for entry in findings.locked:
            self._locked.add(entry.meta.key, entry)
        return findings.outcomes

    def _quarantine(self, entries: Sequence[IndexEntry], *, reuse: bool) -> None:
        """Delete the entries unless they have moved meanwhile."""
        if entries:
            with self._unavailable_counted():
                self._ledger.drop(entries, reuse)

    def _drop_locked(self, count: int) -> bool:
        """Give up copies that no key here opens, for room; return whether there were any."""
        with contextlib.suppress(IndexFull, TierUnavailable):
            return bool(self._ledger.drop(self._locked.take_oldest(count), True))
        return False

    # ------------------------------------------------------------ writing

    def _write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        first: dict[BlockKey, int] = {}
        self._ledger.drop(self._locked.take(meta.key for meta in blocks), True)
        present = self._ledger.index.contains([meta.key for meta in blocks])
        for index, meta in enumerate(blocks):
            if present[index]:
                outcomes[index] = Outcome.EXISTS
            else:
                first.setdefault(meta.key, index)
        places = self._take_places(
            {index: record_size(blocks[index].payload_bytes) for index in first.values()}, outcomes
        )
        entries, failed = self._writer.write(blocks, payloads, places)
        self._segments.give_back([places[index] for index in failed])
        outcomes.update({index: self._write_fault(error) for index, error in failed.items()})
        self._publish(entries, outcomes)
        for index, meta in enumerate(blocks):
            if index not in outcomes:
                # The same block twice in one batch: the second finds the first, if that was stored.
                outcome = outcomes[first[meta.key]]
                outcomes[index] = Outcome.EXISTS if outcome is Outcome.OK else outcome
        return [outcomes[index] for index in range(len(blocks))]

    def _take_places(self, wanted: Mapping[int, int], outcomes: dict[int, Outcome]) -> dict[int, Place]:
        """Take a slot for each index of `wanted` (record bytes); those that get none are answered in `outcomes`."""
        by_size: dict[int, list[int]] = defaultdict(list)
        for index, record_bytes in wanted.items():
            by_size[record_bytes].append(index)
        places: dict[int, Place] = {}
        for record_bytes, indices in by_size.items():
            self._record_bytes = record_bytes
            try:
                taken = self._segments.take(record_bytes, len(indices))
                if (num_short := len(indices) - len(taken)) and self._drop_locked(num_short):
                    taken += self._segments.take(record_bytes, num_short)
            except OSError as error:
                outcomes.update(dict.fromkeys(indices, self._write_fault(error)))
                continue
            places.update(zip(indices, taken, strict=False))
            outcomes.update(dict.fromkeys(indices[len(taken) :], Outcome.FULL))
        return places

    def _publish(self, entries: Mapping[int, IndexEntry], outcomes: dict[int, Outcome]) -> None:
        """Make the entries visible in one durable transaction."""
        if not entries:
            return
        numbers = {entry.place.segment for entry in entries.values()}
        if not self._trouble and (path := self._footing.displaced() or self._segments.displaced(numbers)):
            # It would be gone at the next start, and nothing may be called durable that is.
            self._lose("displaced", f"{path.name} was removed or replaced")
        if self._trouble:
            self._segments.give_back([entry.place for entry in entries.values()])
            raise TierUnavailable(self._trouble)
        try:
            inserted = self._ledger.publish(list(entries.values()))
        except IndexFull as error:
            outcomes.update(dict.fromkeys(entries, Outcome.FULL))
            self._faults.count("index_full", detail=error)
            return
        for index, is_new in zip(entries, inserted, strict=True):
            outcomes[index] = Outcome.OK if is_new else Outcome.EXISTS

    def _write_fault(self, error: OSError) -> Outcome:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._faults.count("disk_full", detail=error)
            return Outcome.FULL
        self._faults.count("write_error", detail=error)
        return Outcome.UNAVAILABLE

    # ------------------------------------------------------------ helpers

    @contextlib.contextmanager
    def _unavailable_counted(self) -> Iterator[None]:
        """Swallow and count a fault of the disk; the caller then answers UNAVAILABLE."""
        try:
            yield
        except DamagedEnvironment as error:
            self._lose("index_damaged", str(error))
            self._ledger.condemn()
        except (TierUnavailable, IndexFull, OSError) as error:
            self._faults.count("unavailable", detail=error)

    def _lose(self, fault: str, why: str) -> None:
        if not self._trouble:
            self._trouble = why
            self._faults.count(fault, detail=why)
