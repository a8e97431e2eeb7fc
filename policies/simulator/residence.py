"""Where each block lies in a simulation: LRU in DRAM and on NVMe, tail before head, and everything in S3."""

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.core.outcome import TierKind


class Residence:
    """Blocks go by the numbers of the trace. Whatever falls out of DRAM is on NVMe until it falls out there, too."""

    def __init__(self, ram_blocks: int | None, ssd_blocks: int | None) -> None:
        self._ram = _Lru(ram_blocks)
        self._ssd = _Lru(ssd_blocks)
        self._s3: set[int] = set()

    def lookup(self, blocks: Sequence[int]) -> list[TierKind]:
        """Return the fastest tier of each leading block that is anywhere."""
        tiers = []
        for block in blocks:
            if block in self._ram:
                tiers.append(TierKind.RAM)
            elif block in self._ssd:
                tiers.append(TierKind.SSD)
            elif block in self._s3:
                tiers.append(TierKind.S3)
            else:
                break
        return tiers

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt's full blocks were computed or loaded: they are in DRAM now, as the newest."""
        self._s3.update(blocks)
        self._ssd.touch(self._ram.touch(blocks[::-1]))


class _Lru:
    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def touch(self, blocks: Sequence[int]) -> list[int]:
        """Insert or renew, the last one as the newest; return what fell out, oldest first."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        fallen = []
        while self._capacity is not None and len(self._blocks) > self._capacity:
            fallen.append(self._blocks.popitem(last=False)[0])
        return fallen
