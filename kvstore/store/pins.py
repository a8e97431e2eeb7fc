"""Pins: blocks that a user wants kept. Each has an owner and a deadline, and all together have a budget per tier.

A pinned block is not evicted from a tier in which it is. No more than a share of each tier can be pinned, so that pins
never keep others out: what does not fit is refused, or, where a pinned session has grown, its tail goes unpinned. A
lease (lease.py) is something else and lasts for one fetch.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import ProtocolError
from kvstore.core.index import Ids
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size
from kvstore.store.catalog import Catalog
from kvstore.wire import ErrorCode

# As many as can be counted in the rows below, and their blocks, each as often as it is pinned: 64 MiB of ids.
_MAX_OWNERS = 65_535
_MAX_BLOCKS = 1 << 24
_MIN_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Pin:
    """`num_held` leading ones of `blocks` are held in each tier."""

    blocks: Ids
    deadline: float
    num_held: Mapping[TierKind, int]


class Pins:
    """Owned by the control thread. An owner has one pin at a time; its blocks keep their catalog entries."""

    def __init__(self, catalog: Catalog, budgets: Mapping[TierKind, Callable[[], int]]) -> None:
        """`budgets` gives the bytes that may be pinned, for each tier that evicts, the fastest first."""
        self._catalog = catalog
        self._budgets = budgets
        self._pins: dict[Hashable, _Pin] = {}
        # How many pins hold each block, by id.
        self._held: dict[TierKind, npt.NDArray[np.uint16]] = {
            tier: np.zeros(_MIN_ROWS, dtype=np.uint16) for tier in budgets
        }
        self._bytes = dict.fromkeys(budgets, 0)
        self._num_blocks = 0
        self._refused = 0

    def __len__(self) -> int:
        return len(self._pins)

    def holds(self, block: int, tier: TierKind) -> bool:
        held = self._held[tier]
        return block < len(held) and bool(held[block])

    def snapshot(self) -> dict[str, int]:
        """Return the section `pins` of the statistics."""
        pinned = {f"{tier.label}_bytes": num_bytes for tier, num_bytes in self._bytes.items()}
        return {"owners": len(self._pins), "refused": self._refused, **pinned}

    def blocks(self) -> list[int]:
        """All blocks of all pins, as often as they are pinned; for tests."""
        return [block for pin in self._pins.values() for block in pin.blocks.tolist()]

    def hold(self, owner: Hashable, blocks: Ids, deadline: float, *, whole: bool) -> None:
        """Pin these blocks of one prefix, in place of what the owner has pinned.

        As many of the first as each tier's budget allows. `whole`: the slowest of the tiers must have room for all;
        else ProtocolError (busy), and the owner's pin is as before.
        """
        before = self._pins.pop(owner, None)
        # First, since what is known only through the pin that ends must not end with it.
        self._catalog.add_session_refs(blocks, 1)
        if before is not None:
            self._count(before, -1)
        pin = _Pin(blocks, deadline, {tier: self._room_for(tier, blocks) for tier in self._budgets})
        last = list(self._budgets)[-1]
        are_too_many = len(self._pins) >= _MAX_OWNERS or self._num_blocks + len(blocks) > _MAX_BLOCKS
        if are_too_many or (whole and pin.num_held[last] < len(blocks)):
            if before is not None:
                self._count(before, 1)
                self._pins[owner] = before
            self._catalog.add_session_refs(blocks, -1)
            if whole:
                self._refuse(last, are_too_many=are_too_many)
            return
        self._count(pin, 1)
        self._pins[owner] = pin
        if before is not None:
            self._catalog.add_session_refs(before.blocks, -1)

    def check(self, owner: Hashable, blocks: Ids, block_bytes: int) -> None:
        """Raise ProtocolError (busy) where the owner cannot pin all of these blocks; -1: one that is not known yet."""
        tier = list(self._budgets)[-1]
        pin = self._pins.get(owner)
        mine = np.zeros(0, dtype=np.int32) if pin is None else pin.blocks[: pin.num_held[tier]]
        self._grow(tier, blocks)
        is_new = (blocks < 0) | (self._held[tier][np.maximum(blocks, 0)] == 0)
        freed = mine[self._held[tier][mine] == 1]
        freed = freed[~np.isin(freed, blocks)]
        if self._bytes[tier] - self._sizes(freed) + int(is_new.sum()) * block_bytes > self._budgets[tier]():
            self._refuse(tier)

    def release_of(self, first: object) -> None:
        """Release all pins whose owner is a tuple that begins with this."""
        for owner in [owner for owner in self._pins if isinstance(owner, tuple) and owner[0] == first]:
            self.release(owner)

    def release(self, owner: Hashable) -> None:
        """An owner without a pin is passed over."""
        pin = self._pins.pop(owner, None)
        if pin is None:
            return
        self._count(pin, -1)
        self._catalog.add_session_refs(pin.blocks, -1)

    def expire(self, now: float) -> None:
        for owner in [owner for owner, pin in self._pins.items() if pin.deadline <= now]:
            self.release(owner)

    # ------------------------------------------------------------ private

    def _refuse(self, tier: TierKind, *, are_too_many: bool = False) -> NoReturn:
        self._refused += 1
        if are_too_many:
            raise ProtocolError(ErrorCode.BUSY, f"not pinned: {len(self._pins)} others are; unpin something")
        raise ProtocolError(
            ErrorCode.BUSY,
            f"not pinned: of {tier.label} {approximate_size(self._budgets[tier]())} may be pinned and "
            f"{approximate_size(self._bytes[tier])} are; unpin something, or raise {tier.label}.pin_share",
        )

    def _count(self, pin: _Pin, change: int) -> None:
        """Enter (1) or leave (-1) the pin in what is known of each tier."""
        self._num_blocks += change * len(pin.blocks)
        for tier, count in pin.num_held.items():
            blocks = pin.blocks[:count]
            self._grow(tier, blocks)
            held = self._held[tier]
            if change > 0:
                self._bytes[tier] += self._sizes(blocks[held[blocks] == 0])
                held[blocks] += 1
            else:
                held[blocks] -= 1
                self._bytes[tier] -= self._sizes(blocks[held[blocks] == 0])

    def _room_for(self, tier: TierKind, blocks: Ids) -> int:
        """Return how many of the first blocks may be pinned in the tier beside those that are."""
        if not len(blocks):
            return 0
        self._grow(tier, blocks)
        # They are of one namespace and so of one size.
        is_new = self._held[tier][blocks] == 0
        after = self._bytes[tier] + np.cumsum(is_new) * self._catalog.size_bytes(int(blocks[0]))
        return int(np.searchsorted(after, self._budgets[tier](), side="right"))

    def _sizes(self, blocks: Ids) -> int:
        return len(blocks) * self._catalog.size_bytes(int(blocks[0])) if len(blocks) else 0

    def _grow(self, tier: TierKind, blocks: Ids) -> None:
        held = self._held[tier]
        rows = int(blocks.max()) + 1 if len(blocks) else 0
        if rows > len(held):
            larger = np.zeros(max(rows, 2 * len(held)), dtype=np.uint16)
            larger[: len(held)] = held
            self._held[tier] = larger
