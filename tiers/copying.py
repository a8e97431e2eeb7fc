"""Copies whole batches between places in memory, on several CPUs where there is enough to copy.

Does not cover: copies between a slot and the engine's paged pool (tiers/hbm.py), which its movers do beside its steps.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from tiers.aligned import copy_bytes
from tiers.crew import Crew, Job

# A CPU copies as much in two milliseconds, and another one is at work in a twentieth of that.
_SHARED_BYTES: Final = 32 << 20
# Shorter ones are copied more slowly, by up to a tenth.
_PIECE_BYTES: Final = 16 << 20
# Beyond it the memory is the limit, and somebody else may want the CPUs.
_MAX_CPUS: Final = 4


class Copier:
    """Thread-safe. Its threads begin with the first large batch and end with it."""

    def __init__(self) -> None:
        self._num_cpus = min(_MAX_CPUS, len(os.sched_getaffinity(0)))
        self._crew = Crew(max(1, self._num_cpus - 1), "copy")

    def copy_all(self, into: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy `sources[i]` to `into[i]`, of the same length; returns when everything is there. Lets other threads of
        the interpreter run meanwhile."""
        if self._num_cpus > 1 and sum(map(len, sources)) >= _SHARED_BYTES:
            self._crew.run(_pieces(into, sources))
            return
        for target, source in zip(into, sources, strict=True):
            copy_bytes(target, source)


def _pieces(into: Sequence[memoryview], sources: Sequence[memoryview]) -> Iterator[Job]:
    for target, source in zip(into, sources, strict=True):
        for start in range(0, len(source), _PIECE_BYTES):
            yield partial(copy_bytes, target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
