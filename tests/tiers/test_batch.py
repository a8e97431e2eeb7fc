"""How blocks become batches of columns."""

import pytest

from kvstore.core.block import BlockMeta
from tests.support.blocks import key, meta
from tiers import batch as module
from tiers.base import RecoveredBatch
from tiers.batch import batches_of


def test_a_batch_is_of_one_namespace_and_size_and_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERED_BLOCKS", 4)
    blocks = [meta(number, 100 * (1 + number % 2)) for number in range(20)]
    blocks += [BlockMeta(key(99), key(98), b"\1" * 32, 5, 100)]
    batches = list(batches_of(blocks))
    assert {(batch.namespace[:1], batch.payload_bytes, len(batch)) for batch in batches} == {
        (meta(0).namespace[:1], 100, 4),
        (meta(0).namespace[:1], 100, 2),
        (meta(0).namespace[:1], 200, 4),
        (meta(0).namespace[:1], 200, 2),
        (b"\1", 100, 1),
    }
    found = [block for batch in batches for block in batch.metas()]
    assert sorted(found, key=lambda block: block.key) == sorted(blocks, key=lambda block: block.key)


def test_columns_of_different_length_are_no_batch() -> None:
    (good,) = batches_of([meta(1), meta(2)])
    with pytest.raises(ValueError, match="differ in length"):
        RecoveredBatch(good.namespace, good.payload_bytes, good.keys[32:], good.parents, good.depths)
