"""The eviction policies by the names that commands and configuration use."""

from collections.abc import Callable
from typing import Final

from policies.base import EvictableView, EvictionPolicy
from policies.eviction.arc import Arc
from policies.eviction.best import Best
from policies.eviction.fifo import Fifo
from policies.eviction.lfu import Lfu
from policies.eviction.lru import Lru
from policies.eviction.s3fifo import S3Fifo

NAMES: Final = ("lru", "fifo", "lfu", "s3fifo", "arc", "gittins")


def make(name: str, view: EvictableView, clock: Callable[[], float]) -> EvictionPolicy:
    """Return a new policy for an empty tier; `clock` gives seconds and never goes back. `name` is one of NAMES."""
    match name:
        case "lru":
            return Lru(view)
        case "fifo":
            return Fifo(view)
        case "lfu":
            return Lfu(view)
        case "s3fifo":
            return S3Fifo(view)
        case "arc":
            return Arc(view)
        case "gittins":
            return Best(view, clock)
    raise ValueError(f"there is no eviction policy {name!r}")
