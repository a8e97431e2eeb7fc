import hashlib

from kvstore.connectors.vllm_parts.seal import SEAL_BYTES, is_whole, seal
from kvstore.core.key import BlockKey


def test_a_sealed_block_is_whole_until_any_byte_of_it_changes() -> None:
    key, other = (BlockKey(hashlib.sha256(name).digest()) for name in (b"one", b"other"))
    slot = memoryview(bytearray(hashlib.shake_256(b"bytes").digest(1000) + bytes(SEAL_BYTES)))
    assert not is_whole(slot, key)
    seal(slot, key)
    assert is_whole(slot, key)
    assert not is_whole(slot, other), "a block in another's place"
    for place in (0, 999, 1000, 1010):
        slot[place] ^= 1
        assert not is_whole(slot, key)
        slot[place] ^= 1
    assert is_whole(slot, key)
