"""Requests that may still go on: an engine commits a prompt in pieces, those of several requests in turns.

A piece goes on with the request whose last piece ended in the block before it. That needs no word from the engine: a
new request begins at the root of its prefix, or says that it is one (`EvictionPolicy.on_request`).
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from policies.base import EvictableView

# A request has ended when so many others went on since, or nothing came of it for so long.
MAX_OPEN: Final = 256
_OPEN_S: Final = 60.0
# Of requests that have come to the same block.
_MAX_TWINS: Final = 8

R = TypeVar("R")


class Open(Generic[R]):
    """By the name of the block that each has come to; of several at one block the last that came goes on first."""

    def __init__(self) -> None:
        self._at: dict[int, list[tuple[float, R]]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def take(self, view: EvictableView, block: int, now_s: float) -> R | None:
        """Return the request that goes on with this block, or None where it begins one."""
        parent = view.parent(block)
        if parent < 0 or not self._at:
            return None
        name = view.name(parent)
        waiting = self._at.get(name)
        if waiting is None:
            return None
        while waiting:
            at_s, request = waiting.pop()
            if not waiting:
                del self._at[name]
            if now_s - at_s <= _OPEN_S:
                return request
        return None

    def put(self, name: int, request: R, now_s: float) -> None:
        """The request has come to the block of this name."""
        waiting = self._at.pop(name, [])
        waiting.append((now_s, request))
        self._at[name] = waiting[-_MAX_TWINS:]
        if len(self._at) > MAX_OPEN:
            del self._at[next(iter(self._at))]

    def close(self, name: int, has_ended: Callable[[R], bool]) -> None:
        """Those that have come to this block, and of which this is true, do not go on."""
        waiting = self._at.get(name)
        if waiting is not None:
            waiting = [(at_s, request) for at_s, request in waiting if not has_ended(request)]
            if waiting:
                self._at[name] = waiting
            else:
                del self._at[name]
