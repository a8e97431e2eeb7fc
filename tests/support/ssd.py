"""An SSD tier that a test may open again and again, and what goes in and comes out of it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, payload
from tiers.ssd import SsdTier

MIB = 1 << 20
OPEN = Callable[..., SsdTier]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def opened(folder: Path) -> Iterator[OPEN]:
    """Opens the tier, closing the one that is open first."""
    tiers: list[SsdTier] = []

    def open_tier(**options: Any) -> SsdTier:
        if tiers:
            tiers[-1].close()
        tiers.append(SsdTier(folder, **{"max_bytes": 16 * MIB, "lock_wait_s": 0.0, **options}))
        return tiers[-1]

    yield open_tier
    if tiers:
        tiers[-1].close()


def store(tier: SsdTier, blocks: Sequence[BlockMeta]) -> list[Outcome]:
    return tier.write(blocks, [payload(block) for block in blocks])


def fetched(tier: SsdTier, blocks: Sequence[BlockMeta]) -> list[Outcome]:
    """Read the blocks; every one that answers OK must have the right bytes."""
    into = [blank(block) for block in blocks]
    outcomes = tier.read(blocks, into)
    for block, view, outcome in zip(blocks, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


def segment_files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())
