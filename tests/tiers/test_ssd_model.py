"""The SSD tier against a plain dict, under any sequence of calls and restarts."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, meta, payload, recovered
from tiers.ssd import SsdTier

# Small enough that the tier is often full; two sizes, so that segments change hands.
MAX_BYTES = 2 << 20
BLOCKS = st.integers(0, 59).map(lambda number: meta(number, 40_960 if number % 2 else 60_000))
BATCHES = st.lists(BLOCKS, min_size=1, max_size=20)


class SsdAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvstore-test-")
        self.held: dict[BlockKey, BlockMeta] = {}
        self.open()

    def open(self) -> None:
        self.tier = SsdTier(Path(self.folder.name), max_bytes=MAX_BYTES, lock_wait_s=0.0)

    @rule(blocks=BATCHES)
    def write(self, blocks: list[BlockMeta]) -> None:
        outcomes = self.tier.write(blocks, [payload(block) for block in blocks])
        for block, outcome in zip(blocks, outcomes, strict=True):
            if block.key in self.held:
                assert outcome is Outcome.EXISTS
            else:
                assert outcome in (Outcome.OK, Outcome.FULL)
                if outcome is Outcome.OK:
                    self.held[block.key] = block

    @rule(blocks=BATCHES)
    def read(self, blocks: list[BlockMeta]) -> None:
        into = [blank(block) for block in blocks]
        for block, view, outcome in zip(blocks, into, self.tier.read(blocks, into), strict=True):
            assert outcome is (Outcome.OK if block.key in self.held else Outcome.MISS)
            assert outcome is Outcome.MISS or view == payload(block)

    @rule(blocks=BATCHES)
    def delete(self, blocks: list[BlockMeta]) -> None:
        keys = list({block.key for block in blocks})
        for key, outcome in zip(keys, self.tier.delete(keys), strict=True):
            assert outcome is (Outcome.OK if self.held.pop(key, None) else Outcome.MISS)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()
        assert {block.key: block for block in recovered(self.tier)} == self.held

    @precondition(lambda self: self.held)
    @rule()
    def delete_all(self) -> None:
        assert set(self.tier.delete(list(self.held))) == {Outcome.OK}
        self.held.clear()

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert self.tier.usage().blocks == len(self.held)
        assert self.tier.faults() == {}

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


TestSsdAgainstDict = SsdAgainstDict.TestCase
TestSsdAgainstDict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
