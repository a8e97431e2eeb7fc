"""Which blocks are written to the slower tiers, and when: all that admission does not refuse, as they come.

    stored, used, promised ─► admission of each tier ─► its demoter, which copies in order of arrival

Owned by the control thread.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvstore.core.index import Ids
from kvstore.core.outcome import TierKind
from kvstore.store.admitting import Admitting
from kvstore.store.catalog import Catalog
from kvstore.store.columns import tier_bit
from kvstore.store.demoter import Demoter
from kvstore.store.unclaimed import Unclaimed

# Of one prefix: longer chains than a store may name are not followed up to their head.
_MAX_CHAIN = 1024
_SLOWER = tier_bit(TierKind.SSD) | tier_bit(TierKind.S3)


class Writing:
    """`uploads_all`: every stored block goes to the bucket, not only those of sessions, which see to that
    themselves."""

    def __init__(
        self,
        catalog: Catalog,
        demoters: Mapping[TierKind, Demoter],
        admitting: Mapping[TierKind, Admitting],
        unclaimed: Unclaimed,
        *,
        uploads_all: bool,
    ) -> None:
        self._catalog = catalog
        self._demoters = demoters
        self._admitting = admitting
        self._unclaimed = unclaimed
        self._uploads_all = uploads_all
        self._has_sessions = False

    # ------------------------------------------------------------ what happens to blocks

    def asked(self, keys: bytes, num_found: int) -> None:
        """A request with this prompt (joined keys) begins; so many of its blocks are there."""
        for admitting in self._admitting.values():
            admitting.asked(keys, num_found)

    def stored(self, blocks: Sequence[int]) -> None:
        """New blocks of one prefix, in order."""
        for tier, admitting in self._admitting.items():
            self._write(tier, admitting.stored(blocks))
        self._keep(blocks)

    def used(self, keys: bytes, blocks: Sequence[int]) -> None:
        """Blocks of one prefix that were used in RAM."""
        for tier, admitting in self._admitting.items():
            self._write(tier, admitting.used(keys, blocks))
        self._keep(blocks)

    def promised(self, blocks: Ids) -> None:
        """Blocks of a session."""
        self._has_sessions = True
        for tier, admitting in self._admitting.items():
            self._write(tier, admitting.promised(blocks))

    def loaded(self, block: int) -> None:
        """A block is in RAM that came from a slower tier."""
        if self._catalog.resident(block, TierKind.SSD):
            self._admitting[TierKind.SSD].read(block)
        else:
            self.write_down([block])

    def evicted(self, tier: TierKind, blocks: Sequence[int]) -> None:
        if tier in self._admitting:
            self._admitting[tier].evicted(blocks)

    def ended(self, block: int) -> None:
        """The block is in no tier any more; its id will be another's."""
        for demoter in self._demoters.values():
            demoter.forget(block)
        for admitting in self._admitting.values():
            admitting.ended(block)
        self._unclaimed.ended(block)

    # ------------------------------------------------------------ what is copied

    def is_awaited(self, block: int) -> bool:
        """Whether some tier has yet to copy it, or may have to soon."""
        return self._unclaimed.holds(block) or any(demoter.holds(block) for demoter in self._demoters.values())

    def give_up(self) -> bool:
        """Await none any more that are not being copied; return whether there were any."""
        return self._unclaimed.give_up()

    def write_down(self, blocks: Iterable[int]) -> None:
        """What is not refused goes to SSD; without one, sessions bring theirs to the bucket themselves."""
        demoter = self._demoters.get(TierKind.SSD)
        if demoter is not None:
            refused = self._admitting[TierKind.SSD].is_refused
            for block in blocks:
                if not refused(block):
                    demoter.add(block)

    def write_down_again(self) -> None:
        """Give blocks another chance that the SSD tier refused until nobody tried any more."""
        demoter = self._demoters.get(TierKind.SSD)
        if demoter is not None and not len(demoter):
            self.write_down(self._catalog.blocks_only_in_ram())

    def _keep(self, blocks: Sequence[int]) -> None:
        """See that those of these blocks stay a while that no tier takes unless a session names them. Where nobody
        records sessions they go as the policy says."""
        if not self._demoters or not self._has_sessions or not len(blocks):
            return
        ids = np.asarray(blocks, dtype=np.int32)
        only_here = ids[(self._catalog.residency_of(ids) & _SLOWER) == 0].tolist()
        demoters = self._demoters.values()
        self._unclaimed.add([block for block in only_here if not any(demoter.wants(block) for demoter in demoters)])

    def _write(self, tier: TierKind, blocks: Sequence[int]) -> None:
        if tier == TierKind.SSD:
            self.write_down(blocks)
        else:
            self._upload(blocks)

    def _upload(self, blocks: Iterable[int]) -> None:
        """Where all blocks go to the bucket: these too, and those before them that it lacks, unless there is a gap that
        nobody could get over."""
        demoter = self._demoters.get(TierKind.S3)
        if demoter is None or not self._uploads_all:
            return
        for block in blocks:
            chain: list[int] = []
            while block >= 0 and not demoter.wants(block) and not self._catalog.resident(block, TierKind.S3):
                if not self._catalog.residency(block) or len(chain) >= _MAX_CHAIN:
                    chain.clear()
                    break
                chain.append(block)
                block = self._catalog.parent(block)
            for missing in reversed(chain):
                demoter.add(missing)
