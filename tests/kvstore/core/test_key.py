"""Keys of blocks: chained hashes of their tokens, or of hashes that an engine has made itself."""

import dataclasses
import hashlib

import numpy as np
import pytest
import xxhash

from kvstore.core.key import KEY_BYTES, BlockKey, HashName, Namespace, chain_keys, engine_keys, event_name

NAMESPACE = Namespace("model", "", "bfloat16", "layout", 16, 4096, num_layers=2, num_kv_heads=1, head_dim=8)


def root(model: str = "model") -> bytes:
    return dataclasses.replace(NAMESPACE, model=model).root()


@pytest.mark.parametrize("hash_name", ["sha256", "xxh3_128"])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 63, 64, 65, 127, 128, 200])
@pytest.mark.parametrize("num_rest", [0, 1, 15])
@pytest.mark.parametrize("begins", [True, False])
def test_a_key_is_the_hash_of_the_one_before_and_the_tokens(
    hash_name: HashName, num_blocks: int, num_rest: int, begins: bool
) -> None:
    namespace = dataclasses.replace(NAMESPACE, hash_name=hash_name)
    tokens = np.random.default_rng(num_blocks).integers(0, 2**32, 16 * num_blocks + num_rest, dtype=np.uint32)
    parent = None if begins else BlockKey(bytes(range(KEY_BYTES)))
    key = namespace.root() if parent is None else parent
    expected = []
    for start in range(0, 16 * num_blocks, 16):
        data = key + b"".join(int(token).to_bytes(4, "little") for token in tokens[start : start + 16])
        hashed = hashlib.sha256(data).digest() if hash_name == "sha256" else 2 * xxhash.xxh3_128_digest(data)
        key = BlockKey(hashed)
        expected.append(key)
    assert chain_keys(namespace, tokens, parent) == expected
    assert chain_keys(namespace, tokens.tolist(), parent) == expected


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
