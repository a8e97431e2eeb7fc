"""Small named records as they lie on the disk or in a bucket: with a checksum, and encrypted where there is a key.

    | magic, checksum of name and all that follows | cipher, key id, salt, nonce, tag | data, or its ciphertext |

A session's record holds what people wrote, so it is encrypted wherever blocks are. The name is authenticated with the
data and is itself in the clear. The checksum needs no key: damage shows to whoever walks over the records.
"""

from struct import Struct
from typing import TYPE_CHECKING

import xxhash

from kvstore.core.block import KEY_ID_BYTES, NONCE_BYTES, SALT_BYTES, TAG_BYTES, Sealing
from kvstore.core.errors import CorruptBlock, WrongKey

if TYPE_CHECKING:
    from tiers.keys import KeyRing

_MAGIC = b"KVR2"
_PLAIN, _AES_GCM = 0, 1
_START = Struct("<4sQ")
_CIPHER = Struct(f"<B{KEY_ID_BYTES}s{SALT_BYTES}s{NONCE_BYTES}s{TAG_BYTES}s")
_PREFIX_BYTES = _START.size + _CIPHER.size


def seal_record(keys: "KeyRing | None", name: str, data: bytes) -> bytes:
    """Return what is to be stored for `data` under `name`."""
    if keys is None:
        body = _CIPHER.pack(_PLAIN, b"", b"", b"", b"") + data
    else:
        sealing, stored = keys.draw(), memoryview(bytearray(len(data)))
        tag = keys.encrypt(sealing, _associated(name, sealing), data, stored)
        body = _CIPHER.pack(_AES_GCM, sealing.key_id, sealing.salt, sealing.nonce, tag) + stored
    return _START.pack(_MAGIC, _checksum(name, body)) + body


def open_record(keys: "KeyRing | None", name: str, sealed: bytes) -> bytes:
    """Return the data. Raises CorruptBlock or WrongKey, as `check_record` does."""
    sealing = check_record(keys, name, sealed)
    stored = sealed[_PREFIX_BYTES:]
    if sealing is None:
        return stored
    assert keys is not None
    *_, tag = _CIPHER.unpack_from(sealed, _START.size)
    data = bytearray(len(stored))
    keys.decrypt(sealing, _associated(name, sealing), tag, stored, memoryview(data))
    return bytes(data)


def check_record(keys: "KeyRing | None", name: str, sealed: bytes) -> Sealing | None:
    """Return how the record is encrypted. Raises CorruptBlock where it is damaged or another's, else WrongKey where it
    cannot be read with these keys."""
    if len(sealed) < _PREFIX_BYTES:
        raise CorruptBlock("the record is too short")
    magic, checksum = _START.unpack_from(sealed)
    if magic != _MAGIC or checksum != _checksum(name, memoryview(sealed)[_START.size :]):
        raise CorruptBlock("the record is damaged or another one")
    cipher, key_id, salt, nonce, _ = _CIPHER.unpack_from(sealed, _START.size)
    if cipher > _AES_GCM:
        raise CorruptBlock(f"the record has cipher {cipher}, which is unknown here")
    sealing = Sealing(key_id, salt, nonce) if cipher == _AES_GCM else None
    if keys is not None:
        keys.check(sealing)
    elif sealing is not None:
        raise WrongKey("the record is encrypted, and there is no key")
    return sealing


def _associated(name: str, sealing: Sealing) -> bytes:
    # Blocks' begin otherwise, so that no block can pass for a record.
    return b"kvstore record\0" + sealing.key_id + sealing.salt + sealing.nonce + name.encode()


def _checksum(name: str, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(name.encode())
    digest.update(b"\0")
    digest.update(body)
    return digest.intdigest()
