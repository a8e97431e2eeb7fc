"""Turns a block's payload into what is stored of it outside of RAM, and back: compressed, encrypted, or as it is.

    payload ──transform──► packed, checksum of the payload ──cipher──► stored         `Codec.seal`
    payload ◄─transform── packed, checksum of the payload ◄──cipher── stored         `Codec.open`

Without transform and key, stored is the payload itself and nothing is copied. In front of the stored bytes goes the
header (`kvstore/core/block.py`), whose checksum is of the stored bytes. A packed payload ends with the xxh3 of the
original, so that a fault of the transform shows as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.core.block import (
    RAW,
    BlockMeta,
    Header,
    associated_data,
    checksum,
    decode_header,
    encode_header,
)
from kvstore.core.errors import CorruptBlock, WrongKey
from tiers.aligned import copy_bytes

if TYPE_CHECKING:
    from tiers.keys import KeyRing

_CHECKSUM = Struct("<Q")


class Transform(Protocol):
    """A lossless compression. Thread-safe."""

    @property
    def number(self) -> int:
        """Its number in headers, 1 to 255, for ever."""
        ...

    def pack(self, meta: BlockMeta, payload: memoryview) -> bytes | bytearray | memoryview | None:
        """Return the payload of the block `meta` in fewer bytes, or None where that is not worth it."""
        ...

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        """Put the payload into `into`, which has its exact length. Raises CorruptBlock for what was never packed."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """Frozen and thread-safe. `transforms` are those that records may be read with, by number, `packs_with` the one
    they are written with; `keys` None neither encrypts nor decrypts."""

    keys: "KeyRing | None" = None
    packs_with: Transform | None = None
    transforms: Mapping[int, Transform] = field(default_factory=dict)

    def seal(self, meta: BlockMeta, payload: memoryview, into: memoryview | None = None) -> tuple[bytes, memoryview]:
        """Return the header page of a record and what is to be stored behind it.

        The second is a part of `into` (a writable place of at least payload_bytes bytes) where one is given, unless it
        was packed; else `payload` itself where nothing is to be done to it, else memory of its own.
        """
        number, plain = self._packed(meta, payload)
        if self.keys is None:
            if into is not None and number == RAW:
                # The copy is what is stored, and it is in the processor's cache.
                copy_bytes(into[: len(plain)], plain)
                plain = into[: len(plain)]
            return encode_header(Header(meta, len(plain), checksum(plain), number)), plain
        stored = memoryview(bytearray(len(plain))) if into is None else into[: len(plain)]
        header = Header(meta, len(plain), codec=number, sealing=self.keys.draw())
        assert header.sealing is not None
        tag = self.keys.encrypt(header.sealing, associated_data(header), plain, stored)
        return encode_header(replace(header, checksum=checksum(stored), tag=tag)), stored

    def open(
        self,
        meta: BlockMeta,
        header: bytes | memoryview,
        stored: memoryview,
        into: memoryview,
        stored_checksum: int | None = None,
    ) -> Header:
        """Put the payload of the block `meta` into `into`, and return what its header says.

        `stored` may be `into` itself where the codec is RAW: then nothing is copied. `stored_checksum` is that of
        `stored` where the caller has made it. Raises CorruptBlock, saying what differs, or WrongKey; the content of
        `into` is then undefined.
        """
        found = decode_header(header)
        if found.meta != meta:
            raise CorruptBlock("the record holds another block")
        self.check(found, stored, stored_checksum)
        if found.codec == RAW:
            if found.sealing is not None:
                self._decrypt(found, stored, into)
            elif stored is not into:
                copy_bytes(into, stored)
            return found
        packed = stored
        if found.sealing is not None:
            packed = memoryview(bytearray(found.stored_bytes))
            self._decrypt(found, stored, packed)
        self._unpack(found.codec, packed, into)
        return found

    def check(self, header: Header, stored: memoryview, stored_checksum: int | None = None) -> None:
        """Check everything that shows without decrypting and unpacking. Raises CorruptBlock or WrongKey, CorruptBlock
        first: what is damaged is so whatever the key."""
        if len(stored) != header.stored_bytes:
            raise CorruptBlock(f"{len(stored)} bytes are stored, expected {header.stored_bytes}")
        if (checksum(stored) if stored_checksum is None else stored_checksum) != header.checksum:
            raise CorruptBlock("the stored bytes do not match their checksum")
        if header.codec != RAW and header.codec not in self.transforms:
            raise CorruptBlock(f"the record was packed with transform {header.codec}, which is unknown here")
        if self.keys is not None:
            self.keys.check(header.sealing)
        elif header.sealing is not None:
            raise WrongKey("the record is encrypted, and there is no key")

    def _packed(self, meta: BlockMeta, payload: memoryview) -> tuple[int, memoryview]:
        if self.packs_with is not None:
            packed = self.packs_with.pack(meta, payload)
            if packed is not None and len(packed) + _CHECKSUM.size < len(payload):
                joined = b"".join((packed, _CHECKSUM.pack(checksum(payload))))
                return self.packs_with.number, memoryview(joined)
        return RAW, payload

    def _decrypt(self, header: Header, stored: memoryview, into: memoryview) -> None:
        assert self.keys is not None and header.sealing is not None
        self.keys.decrypt(header.sealing, associated_data(header), header.tag, stored, into)

    def _unpack(self, number: int, packed: memoryview, into: memoryview) -> None:
        if len(packed) <= _CHECKSUM.size:
            raise CorruptBlock("the packed payload is too short")
        self.transforms[number].unpack(packed[: -_CHECKSUM.size], into)
        if checksum(into) != _CHECKSUM.unpack(packed[-_CHECKSUM.size :])[0]:
            raise CorruptBlock("the payload does not match its checksum after unpacking")


PLAIN: Final = Codec()
"""Stores every payload as it is."""
