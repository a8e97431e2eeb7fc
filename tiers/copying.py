"""Copies whole batches between places in memory, on several CPUs where there is enough to copy.

Does not cover: copies between a slot and the engine's paged pool (tiers/hbm.py), which its movers do beside its steps.
"""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from tiers.aligned import copy_bytes
from tiers.crew import Crew, Job

# A CPU copies as much in two milliseconds, and another one is at work in a twentieth of that.
_SHARED_BYTES: Final = 32 << 20
# Shorter pieces are copied more slowly, by up to a tenth, and so are more jobs.
_SHARE_BYTES: Final = 16 << 20
_FIRST_SHARE_BYTES: Final = 2 << 20
# Beyond it the memory is the limit, and somebody else may want the CPUs.
_MAX_CPUS: Final = 4


class Copier:
    """Thread-safe. Its threads begin with the first large batch."""

    def __init__(self) -> None:
        self._num_cpus = min(_MAX_CPUS, len(os.sched_getaffinity(0)))
        self._crew = Crew(self._num_cpus - 1, "copy")

    def copy_all(self, pairs: Iterable[tuple[memoryview, memoryview]], num_bytes: int) -> None:
        """Copy each pair's second view, at most `num_bytes` in all, to its first, which is as long; returns when
        everything is there. Lets other threads of the interpreter run meanwhile.

        The pairs are drawn as they are needed, by one thread at a time.
        """
        if self._num_cpus > 1 and num_bytes >= _SHARED_BYTES:
            self._crew.run(_shares(pairs))
        else:
            _copy(pairs)

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._crew.close()


def _shares(pairs: Iterable[tuple[memoryview, memoryview]]) -> Iterator[Job]:
    """Yield jobs that copy more and more, so that the first begins at once; whole views where they are not longer."""
    share: list[tuple[memoryview, memoryview]] = []
    share_bytes, wanted_bytes = 0, _FIRST_SHARE_BYTES
    for into, source in pairs:
        start = 0
        while start < len(source):
            part = slice(start, start + wanted_bytes)
            share.append((into[part], source[part]))
            start += len(source[part])
            share_bytes += len(source[part])
            if share_bytes >= wanted_bytes:
                yield partial(_copy, share)
                share, share_bytes = [], 0
                wanted_bytes = min(2 * wanted_bytes, _SHARE_BYTES)
    if share:
        yield partial(_copy, share)


def _copy(pairs: Iterable[tuple[memoryview, memoryview]]) -> None:
    for into, source in pairs:
        copy_bytes(into, source)
