"""What all contenders of the comparison have in common: a process of its own that does one operation at a time, timed.

The first line on standard input is the Task as JSON, each further one `{"op": NAME, "round": NUMBER, "times": COUNT,
"pause_s": BEFORE_EACH}`. The answers go to standard output, one line each: first `{"about": TEXT, "ops": [NAMES]}`,
then `{"seconds": [S, ...]}` or `{"error": TEXT}`.
An operation times itself, so that what it has to prepare and clear away does not count. A store comes before the fetch
of the same round, which gets its blocks back and clears them away.

Needs the standard library alone, since it runs in the environment of each peer.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Task:
    """`folder` is empty and lies on the disk, `shm_dir` in shared memory; both belong to this contender alone."""

    folder: str
    shm_dir: str
    block_bytes: int
    num_blocks: int
    threads: int
    lookup_tokens: int
    block_tokens: int
    rounds: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


class Contender(Protocol):
    """`about` names versions and settings; `ops[name](round)` returns seconds."""

    about: str
    ops: dict[str, Callable[[int], float]]

    def close(self) -> None: ...


def serve(make: Callable[[Task], Contender]) -> None:
    """Answer until standard input ends."""
    # Whatever a library prints goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task(**json.loads(sys.stdin.readline()))
    contender = make(task)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        answer({"about": contender.about, "ops": sorted(contender.ops)})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                run = contender.ops[asked["op"]]
                answer({"seconds": _times(run, asked["round"], asked["times"], asked["pause_s"])})
            except Exception as error:
                # The root of every operation: a peer's fault costs its figure, and is told to whoever asked.
                traceback.print_exc()
                answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        contender.close()


def _times(run: Callable[[int], float], number: int, times: int, pause_s: float) -> list[float]:
    """Return the seconds of each time. They follow each other here, since who asks for one at a time wakes up between
    them, and takes the caches: an echo over a socket took 60 us so, and takes 14."""
    seconds = []
    for _ in range(times):
        if pause_s:
            time.sleep(pause_s)
        seconds.append(run(number))
    return seconds


class Buffers:
    """`count` page-aligned buffers, all of their pages touched; no two hold the same bytes.

    On huge pages where the system has them: how small pages happen to be scattered over the memory changed direct reads
    by half between two runs, and it should not be luck who gets which.
    """

    def __init__(self, count: int, num_bytes: int, *, filled: bool) -> None:
        stride = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self.mapping = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self.mapping)
        self.views = [whole[i * stride : i * stride + num_bytes] for i in range(count)]
        noise = os.urandom(min(num_bytes, 1 << 20)) if filled else bytes(min(num_bytes, 1 << 20))
        for number, view in enumerate(self.views):
            for start in range(0, num_bytes, len(noise)):
                part = view[start : start + len(noise)]
                part[:] = noise[: len(part)]
            if filled:
                head = number.to_bytes(8, "little")[:num_bytes]
                view[: len(head)] = head


def check(there: Buffers, here: Buffers) -> None:
    """Raises ValueError unless the bytes came back."""
    for got, sent in zip(there.views, here.views, strict=True):
        if got[:4096] != sent[:4096] or got[-4096:] != sent[-4096:]:
            raise ValueError("other bytes came back")
    # So that the next round cannot find this one's.
    for view in there.views:
        view[:8] = bytes(len(view[:8]))


def shuffled(count: int, seed: int) -> list[int]:
    """The random order that everybody reads in."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def prompt(num_tokens: int) -> list[int]:
    """The token ids of the lookup."""
    return [(number * 2654435761) % 128_000 for number in range(num_tokens)]


def drop_cache(folder: str) -> None:
    """Drop the pages of every file below from the cache; they are synced first, since dirty ones stay."""
    for path in files_below(folder):
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync_files(folder: str) -> None:
    """Make every file below durable, and its name."""
    for path in files_below(folder):
        with opened(path, os.O_RDONLY) as descriptor:
            os.fdatasync(descriptor)
    for parent in {os.path.dirname(path) for path in files_below(folder)} | {folder}:
        with opened(parent, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)


def files_below(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(parent, name)


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def end_with_parent() -> None:
    """For children: be killed when this process ends."""
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
