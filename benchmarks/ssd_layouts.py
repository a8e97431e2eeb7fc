"""Where to keep payloads: (a) as values in LMDB, or (b) in segments beside an LMDB that is the index only.

    python -m benchmarks.ssd_layouts [--folder DIR] [--block-bytes 2097152] [--blocks 64] [--rounds 7] [--json]

Both store the same blocks durably (32 MiB per transaction, checksums included) from the same memory and read them back
cold, in random order, on four threads, verified; each round runs both and a plain file in turn, beginning with another
one each time, and the medians count. Then both are filled until one batch more makes 90%, and turned over: random
blocks are deleted and as many new ones written, a batch at a time.

(a) is as good as LMDB gets: plain writes (writemap is slower), a header of 4,080 bytes in front of each payload, which
puts the payload on a page of the file, and reads by file offset past the page cache, by way of the same buffers as (b),
while a read transaction holds the value. (b) is the tier itself. The file: direct I/O, no checksum, no index.
"""

import argparse
import json
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import lmdb
import numpy as np

from kvstore.bench.files import drop_cache
from kvstore.bench.machine import describe
from kvstore.core.block import BlockMeta, checksum
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.aligned import AlignedBuffers, address_of, copy_bytes
from tiers.pages import PAGE_BYTES
from tiers.ssd import SsdTier

_BATCH_BYTES = 32 << 20
_THREADS = 4
_HEADER_BYTES = 4080
_TURNOVERS = 3
_FULL = 0.9


class Layout(Protocol):
    """Stores equal blocks by number. `write` is durable on return; `read` is called from several threads."""

    def write(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None: ...

    def read(self, number: int, into: memoryview) -> None: ...

    def delete(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class LmdbValues:
    """Layout (a)."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir()
        path = folder / "values.mdb"
        self._environment: Any = lmdb.open(str(path), subdir=False, map_size=max_bytes, readahead=False, meminit=False)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        maps = Path("/proc/self/maps").read_text().splitlines()
        self._base = next(int(line.partition("-")[0], 16) for line in maps if line.endswith(str(path)))
        self._buffers = AlignedBuffers()

    def write(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        with self._environment.begin(write=True) as transaction:
            for number, payload in zip(numbers, payloads, strict=True):
                header = checksum(payload).to_bytes(8, "little").ljust(_HEADER_BYTES, b"\0")
                transaction.put(_key(number), b"".join((header, payload)))

    def read(self, number: int, into: memoryview) -> None:
        with self._environment.begin(buffers=True) as transaction:
            offset = address_of(transaction.get(_key(number))) - self._base
            start = offset // PAGE_BYTES * PAGE_BYTES
            with self._buffers.borrow(PAGE_BYTES + len(into)) as buffer:
                if os.preadv(self._descriptor, [buffer], start) < len(buffer):
                    raise OSError("the file is too short")
                stored = buffer[offset - start :]
                copy_bytes(into, stored[_HEADER_BYTES : _HEADER_BYTES + len(into)])
                expected = int.from_bytes(stored[:8], "little")
        if checksum(into) != expected:
            raise ValueError("other bytes came back")

    def delete(self, numbers: Sequence[int]) -> None:
        with self._environment.begin(write=True) as transaction:
            for number in numbers:
                transaction.delete(_key(number))

    def close(self) -> None:
        os.close(self._descriptor)
        self._environment.close()


class Segmented:
    """Layout (b)."""

    def __init__(self, folder: Path, max_bytes: int, block_bytes: int) -> None:
        self._tier = SsdTier(folder, max_bytes=max_bytes, max_record_bytes=1 << 20)
        self._block_bytes = block_bytes

    def write(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        _expect(self._tier.write([self._meta(number) for number in numbers], payloads))

    def read(self, number: int, into: memoryview) -> None:
        _expect(self._tier.read([self._meta(number)], [into]))

    def delete(self, numbers: Sequence[int]) -> None:
        _expect(self._tier.delete([_key(number) for number in numbers]))

    def close(self) -> None:
        self._tier.close()

    def _meta(self, number: int) -> BlockMeta:
        return BlockMeta(_key(number), _key(number), bytes(32), 0, self._block_bytes)


class PlainFile:
    """The ceiling: slots of one file that was written before."""

    def __init__(self, path: Path, num_slots: int, block_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._descriptor, 0, num_slots * block_bytes)
        self._num_slots = num_slots

    def write(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for number, payload in zip(numbers, payloads, strict=True):
            os.pwrite(self._descriptor, payload, number % self._num_slots * len(payload))
        os.fdatasync(self._descriptor)

    def read(self, number: int, into: memoryview) -> None:
        os.preadv(self._descriptor, [into], number % self._num_slots * len(into))

    def delete(self, numbers: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        os.close(self._descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the temporary one)")
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-layouts-", dir=options.folder) as name:
        machine = describe(Path(name), Path("/dev/shm"))
        figures = measure(Path(name), options.block_bytes, options.blocks, options.rounds)
    if options.json:
        print(json.dumps({"machine": machine, "block_bytes": options.block_bytes, "gb_per_s": figures}, indent=2))
        return
    disk = machine["ssd"]
    print(f"{options.blocks} blocks of {options.block_bytes} bytes, medians of {options.rounds} rounds, GB/s")
    print(f"{machine['cpu']}, {machine['cores']} cores, {disk['file_system']} on {disk['device']}")
    print(f"{'':24}{'file':>8}{'LMDB values':>13}{'segments':>10}{'segments/LMDB':>15}")
    for what, speeds in figures.items():
        plain = f"{speeds['file']:8.2f}" if "file" in speeds else f"{'':8}"
        ratio = speeds["segments"] / speeds["lmdb"]
        print(f"{what:24}{plain}{speeds['lmdb']:13.2f}{speeds['segments']:10.2f}{ratio:15.2f}")


def measure(folder: Path, block_bytes: int, num_blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return GB/s by what was done and by layout."""
    total_bytes = num_blocks * block_bytes
    slots = _memory(num_blocks, block_bytes)
    cap_bytes = 3 * total_bytes + (96 << 20)
    layouts: dict[str, Layout] = {
        "file": PlainFile(folder / "plain", num_blocks, block_bytes),
        "lmdb": LmdbValues(folder / "lmdb", cap_bytes),
        "segments": Segmented(folder / "segments", cap_bytes, block_bytes),
    }
    figures = _in_turns(layouts, folder, slots, rounds)
    for layout in layouts.values():
        layout.close()
    churned = {
        "lmdb": LmdbValues(folder / "lmdb-full", cap_bytes),
        "segments": Segmented(folder / "segments-full", cap_bytes, block_bytes),
    }
    figures["churn at 90% full"] = _churn(churned, slots, int(_FULL * cap_bytes) // block_bytes)
    return figures


def _in_turns(
    layouts: dict[str, Layout], folder: Path, slots: list[memoryview], rounds: int
) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in layouts} for what in ("durable write", "cold read")
    }
    names = list(layouts)
    with ThreadPoolExecutor(_THREADS) as threads:
        # One round more, which does not count: it touches everything first.
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                layout, numbers = layouts[name], range(number * len(slots), (number + 1) * len(slots))
                write_s = _timed(lambda layout=layout, numbers=numbers: _write(layout, numbers, slots))
                drop_cache(folder)
                order = random.Random(number).sample(numbers, len(numbers))
                read_s = _timed(
                    lambda layout=layout, order=order: list(
                        threads.map(lambda one: layout.read(one, slots[one % len(slots)]), order)
                    )
                )
                layout.delete(numbers)
                if number:
                    seconds["durable write"][name].append(write_s)
                    seconds["cold read"][name].append(read_s)
    total_bytes = sum(map(len, slots))
    return {
        what: {name: total_bytes / median(taken) / 1e9 for name, taken in by_name.items()}
        for what, by_name in seconds.items()
    }


def _churn(layouts: dict[str, Layout], slots: list[memoryview], num_full: int) -> dict[str, float]:
    """Fill, then replace random blocks a batch at a time until all were replaced some times; GB/s over all of it."""
    at_once = max(1, _BATCH_BYTES // len(slots[0]))
    speeds = {}
    for name, layout in layouts.items():
        held = list(range(num_full - at_once))
        for start in range(0, len(held), at_once):
            part = held[start : start + at_once]
            layout.write(part, [slots[one % len(slots)] for one in part])
        chooser, following, taken_s, replaced = random.Random(1), num_full, 0.0, 0
        while replaced < _TURNOVERS * num_full:
            chooser.shuffle(held)
            gone, held = held[:at_once], held[at_once:]
            new = list(range(following, following + at_once))
            following += at_once
            started = time.perf_counter()
            layout.delete(gone)
            layout.write(new, [slots[one % len(slots)] for one in new])
            taken_s += time.perf_counter() - started
            held += new
            replaced += at_once
        layout.close()
        speeds[name] = replaced * len(slots[0]) / taken_s / 1e9
    return speeds


def _write(layout: Layout, numbers: Sequence[int], slots: list[memoryview]) -> None:
    at_once = max(1, _BATCH_BYTES // len(slots[0]))
    for start in range(0, len(numbers), at_once):
        part = numbers[start : start + at_once]
        layout.write(part, [slots[one % len(slots)] for one in part])


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _memory(count: int, num_bytes: int) -> list[memoryview]:
    """Shared memory, as slots are, full of noise."""
    view = memoryview(mmap.mmap(-1, count * num_bytes))
    noise = np.random.default_rng(1).integers(0, 256, len(view), dtype=np.uint8)
    copy_bytes(view, memoryview(noise))
    return [view[index * num_bytes : (index + 1) * num_bytes] for index in range(count)]


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def _expect(outcomes: Sequence[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"the tier answered {outcomes}")


if __name__ == "__main__":
    main()
