"""Tells objects that belong to one process when a fork has copied them into a child.

Two processes on one connection take each other's answers, and as one engine they end each other's grants and write into
each other's slots. So the child's copies let go of what is the parent's, before anything else runs in the child.
Does not cover: children that replace their program, where descriptors are closed by the system.
"""

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """This is the child's copy: let go of what is the parent's, without ending it. Never raises or waits: locks may
        be held by threads that this process does not have."""
        ...


_watched: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def watch(one: Forkable) -> None:
    """Have `forked` called in every child from now on, for as long as the object lives."""
    _watched.add(one)


def _tell() -> None:
    for one in list(_watched):
        one.forked()


os.register_at_fork(after_in_child=_tell)
