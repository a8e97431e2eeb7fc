"""Tombstones: what says in the bucket that a session was deleted, before anything of it is.

    tombstones/{hash of the session's key and of when it was begun}

Every daemon reads them (the janitor) and drops what they cover. One covers the session that it names, begun at that
time, up to that revision: a later revision, or a session that was begun under the same name afterwards, is another one.
They are kept as long as a daemon that was away might come back with the session: its `ttl`, within KEEP_S.

Where a session is deleted at two daemons that knew different turns of it, one tombstone covers what both did.
"""

import hashlib
import math
import struct
from typing import Final

import msgspec

from kvstore.core.errors import TierUnavailable, WrongKey
from kvstore.core.key import KEY_BYTES, split_keys
from kvstore.session_record import SessionKey, record_name, seal, unseal
from tiers.base import RecordStore

TOMBSTONE_PREFIX: Final = "tombstones/"
KEEP_S: Final = (86_400.0, 30 * 86_400.0)
_TRIES = 5
_MAGIC = b"KVTOMB1\n"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """`keys` are the session's blocks, joined, until those that nobody else uses have been deleted; then it is empty.

    `deleted_s` is the clock of whoever deleted it.
    """

    tenant: str
    namespace: bytes
    id: str
    created_s: float
    revision: int
    keys: bytes
    deleted_s: float
    keep_s: float

    @property
    def session_key(self) -> SessionKey:
        return (self.tenant, self.namespace, self.id)

    @property
    def name(self) -> str:
        return tombstone_name(self.session_key, self.created_s)

    def covers(self, key: SessionKey, created_s: float, revision: int) -> bool:
        return key == self.session_key and created_s == self.created_s and revision <= self.revision


def make_tombstone(
    key: SessionKey, created_s: float, revision: int, keys: bytes, ttl_s: float, now_s: float
) -> Tombstone:
    tenant, namespace, session_id = key
    return Tombstone(
        tenant=tenant,
        namespace=namespace,
        id=session_id,
        created_s=created_s,
        revision=revision,
        keys=keys,
        deleted_s=now_s,
        keep_s=min(max(ttl_s, KEEP_S[0]), KEEP_S[1]),
    )


def tombstone_name(key: SessionKey, created_s: float) -> str:
    named = hashlib.sha256(record_name(key).encode() + struct.pack("<d", created_s))
    return TOMBSTONE_PREFIX + named.hexdigest()


def put(store: RecordStore, stone: Tombstone) -> tuple[Tombstone, str]:
    """Write a tombstone, together with what there is under its name; return what is there now, and its tag.

    Raises TierUnavailable, also where others write it all the time.
    """
    for _ in range(_TRIES):
        try:
            found = store.get(stone.name)
        except WrongKey:
            found = None
        present = None if found is None else decode(found.data)
        # What is no tombstone, or cannot be read, is replaced.
        whole = stone if present is None else _together(stone, present)
        etag = store.put(stone.name, encode(whole), if_match=None if present is None or found is None else found.etag)
        if etag is not None:
            return whole, etag
    raise TierUnavailable("a tombstone is being written by many at once")


def encode(tombstone: Tombstone) -> bytes:
    return seal(_MAGIC, msgspec.msgpack.encode(tombstone))


def decode(data: bytes) -> Tombstone | None:
    """Return None for what is no tombstone, or not whole."""
    body = unseal(_MAGIC, data)
    if body is None:
        return None
    try:
        tombstone = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError):
        return None
    is_sound = (
        len(tombstone.namespace) == KEY_BYTES
        and len(tombstone.keys) % KEY_BYTES == 0
        and all(map(math.isfinite, (tombstone.created_s, tombstone.deleted_s, tombstone.keep_s)))
    )
    return tombstone if is_sound else None


def _together(stone: Tombstone, present: Tombstone) -> Tombstone:
    known = set(split_keys(stone.keys))
    others = [key for key in split_keys(present.keys) if key not in known]
    return msgspec.structs.replace(
        stone,
        revision=max(stone.revision, present.revision),
        keys=b"".join([stone.keys, *others]),
        keep_s=max(stone.keep_s, present.keep_s),
    )


_decoder = msgspec.msgpack.Decoder(Tombstone)
