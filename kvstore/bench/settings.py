"""What one run of `kvstore bench tiers` measures, and where."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.key import Namespace

PARTS: Final = ("ram", "ssd", "s3", "lookup", "catalog", "daemon")
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of one size, and how many of them a round moves."""

    block_bytes: int
    num_blocks: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """`folder` lies on the disk to be measured and is empty, `shm_dir` on the tmpfs for regions; both are made and
    removed by the caller. `rounds` are counted ones. `churn_bytes` is the cap of the tier that is turned over."""

    folder: Path
    shm_dir: Path
    sizes: tuple[Sizes, ...]
    rounds: int = 7
    parts: tuple[str, ...] = PARTS
    ssd_threads: int = 6
    s3_threads: int = 8
    churn_bytes: int = 512 * MIB
    lookup_tokens: int = 131_072
    lookup_rounds: int = 400
    catalog_blocks: int = 1_000_000


def namespace(block_bytes: int, block_tokens: int = 256, name: str = "bench") -> Namespace:
    """Return a namespace of blocks of that size; nothing in it is a real model's."""
    return Namespace(
        model=name,
        weights_digest="",
        dtype="bfloat16",
        kv_layout="bench-1",
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
    )
