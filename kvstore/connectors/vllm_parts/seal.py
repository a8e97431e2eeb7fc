"""The checksum that follows a block's bytes in its slot, from the copy out of one engine's KV cache to the copy into
another's: whatever tier, wire or mapping lies between, damaged bytes are not taken for the block's.

    | pages of all layers | magic | xxh3 of the pages, with the key as its seed | zeros up to SEAL_BYTES |
"""

from typing import Final

import xxhash

from kvstore.core.key import BlockKey

# A cache line, so that slots of pages stay aligned.
SEAL_BYTES: Final = 64

_MAGIC = b"KVVLLM1\n"
_DIGEST_BYTES = 16


def seal(slot: memoryview, key: BlockKey) -> None:
    """Write the checksum behind the block's bytes, which fill all of `slot` but its end."""
    body = slot.nbytes - SEAL_BYTES
    slot[body:] = (_MAGIC + _digest(slot[:body], key)).ljust(SEAL_BYTES, b"\0")


def is_whole(slot: memoryview, key: BlockKey) -> bool:
    """Whether the bytes are those that were sealed for this key: no flipped bit, no other block's."""
    body = slot.nbytes - SEAL_BYTES
    end = bytes(slot[body : body + len(_MAGIC) + _DIGEST_BYTES])
    return end == _MAGIC + _digest(slot[:body], key)


def _digest(body: memoryview, key: BlockKey) -> bytes:
    # The key as the seed, so that a block in another's place is not taken for it.
    return xxhash.xxh3_128_digest(body, seed=int.from_bytes(key[:8], "little"))
