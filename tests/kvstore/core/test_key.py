"""Keys of blocks that an engine has hashed itself."""

import pytest

from kvstore.core.key import KEY_BYTES, Namespace, engine_keys, event_name


def root(model: str = "model") -> bytes:
    return Namespace(model, "", "bfloat16", "layout", 16, 4096, num_layers=2, num_kv_heads=1, head_dim=8).root()


@pytest.mark.parametrize("num_bytes", [16, 32])
def test_events_call_a_block_what_its_engine_calls_it(num_bytes: int) -> None:
    """vLLM cuts its hashes to their last 64 bits, and routers know blocks by those."""
    hashes = [bytes(range(begin, begin + num_bytes)) for begin in (0, 7, 100)]
    names = [event_name(key) for key in engine_keys(root(), hashes)]
    assert names == [int.from_bytes(value, "big") & ((1 << 64) - 1) for value in hashes]


def test_equal_hashes_have_equal_keys_in_one_namespace_only() -> None:
    value = bytes(32)
    (key,) = engine_keys(root(), [value])
    assert len(key) == KEY_BYTES
    assert engine_keys(root(), [value]) == [key]
    assert engine_keys(root("another"), [value]) != [key]


def test_hashes_that_differ_only_before_their_end_have_different_keys() -> None:
    one, other = engine_keys(root(), [b"\0" * 24 + b"same end", b"\1" * 24 + b"same end"])
    assert one != other
    assert event_name(one) == event_name(other)


@pytest.mark.parametrize("hashes", [[b"1234567"], [b""], [bytes(32), bytes(16)], [bytes(16), bytes(32)], [bytes(64)]])
def test_hashes_of_other_lengths_are_refused(hashes: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 or 16 bytes"):
        engine_keys(root(), hashes)


def test_no_hashes_have_no_keys() -> None:
    assert engine_keys(root(), []) == []
