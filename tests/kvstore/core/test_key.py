"""Keys of blocks that an engine has hashed itself."""

import pytest

from kvstore.core.key import KEY_BYTES, Namespace, engine_keys, event_name


def namespace(model: str = "model") -> Namespace:
    return Namespace(model, "", "bfloat16", "layout", 16, 4096, num_layers=2, num_kv_heads=1, head_dim=8)


def test_events_call_a_block_what_its_engine_calls_it() -> None:
    """vLLM cuts its hashes to their last 64 bits, and routers know blocks by those."""
    hashes = [bytes(range(32)), bytes(range(16, 32)), bytes(range(8))]
    names = [event_name(key) for key in engine_keys(namespace(), hashes)]
    assert names == [int.from_bytes(value, "big") & ((1 << 64) - 1) for value in hashes]


def test_equal_hashes_have_equal_keys_in_one_namespace_only() -> None:
    value = bytes(32)
    (key,) = engine_keys(namespace(), [value])
    assert len(key) == KEY_BYTES
    assert engine_keys(namespace(), [value]) == [key]
    assert engine_keys(namespace("another"), [value]) != [key]


def test_hashes_that_differ_only_before_their_end_have_different_keys() -> None:
    one, other = engine_keys(namespace(), [b"\0" * 24 + b"same end", b"\1" * 24 + b"same end"])
    assert one != other
    assert event_name(one) == event_name(other)


def test_a_hash_that_is_too_short_to_name_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 bytes"):
        engine_keys(namespace(), [b"1234567"])
