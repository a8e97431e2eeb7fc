"""Payload to stored bytes and back: nothing but the block itself ever comes out."""

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.block import HEADER_BYTES, RAW, BlockMeta, checksum, decode_header, encode_header
from kvstore.core.errors import CorruptBlock, WrongKey
from tests.support.blocks import blank, meta, payload
from tiers.codec import PLAIN, Codec
from tiers.keys import KeyRing

KEY, OTHER = bytes(range(32)), bytes(range(50, 82))


class Zlib:
    """A transform of the standard library."""

    number = 200

    def pack(self, _meta: BlockMeta, payload: memoryview) -> bytes | None:
        return zlib.compress(payload, 1)

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        try:
            into[:] = zlib.decompress(packed)
        except (zlib.error, ValueError) as error:
            raise CorruptBlock(str(error)) from None


class Forgetful(Zlib):
    """A transform with a fault: what it gives back is not what it was given."""

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        into[:] = bytes(len(into))


ZLIB = Zlib()
PACKING = Codec(packs_with=ZLIB, transforms={200: ZLIB})
CODECS = {
    "plain": PLAIN,
    "encrypted": Codec(KeyRing(KEY)),
    "packed": PACKING,
    "packed_encrypted": replace(PACKING, keys=KeyRing(KEY)),
}
on_all = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
on_encrypting = pytest.mark.parametrize("codec", [CODECS["encrypted"], CODECS["packed_encrypted"]])


def compressible(block: BlockMeta) -> memoryview:
    return memoryview((bytes(payload(block)[:16]) * block.payload_bytes)[: block.payload_bytes])


def opened(codec: Codec, block: BlockMeta, header: bytes, stored: memoryview | bytes) -> memoryview:
    into = blank(block)
    codec.open(block, header, memoryview(stored), into)
    return into


@on_all
@given(content=st.binary(min_size=1, max_size=3000))
def test_what_was_sealed_opens_as_the_same(codec: Codec, content: bytes) -> None:
    block = meta(1, len(content))
    header, stored = codec.seal(block, memoryview(content))
    assert len(header) == HEADER_BYTES
    assert decode_header(header).stored_bytes == len(stored) <= len(content)
    assert opened(codec, block, header, stored) == content


def test_a_plain_codec_copies_nothing() -> None:
    view = payload(meta(1))
    _, stored = PLAIN.seal(meta(1), view)
    assert stored is view
    place = memoryview(bytearray(stored))
    PLAIN.open(meta(1), PLAIN.seal(meta(1), view)[0], place, place)


def test_an_encrypting_codec_writes_to_the_place_it_is_given_and_opens_there() -> None:
    codec, place = CODECS["encrypted"], memoryview(bytearray(10_000))
    header, stored = codec.seal(meta(1), payload(meta(1)), place)
    assert stored.obj is place.obj
    assert len(stored) == 8192
    assert stored != payload(meta(1))
    codec.open(meta(1), header, stored, stored)
    assert stored == payload(meta(1))


def test_what_can_be_packed_takes_fewer_bytes_and_what_cannot_stays_raw() -> None:
    header, stored = PACKING.seal(meta(1), compressible(meta(1)))
    assert len(stored) < 1000
    assert decode_header(header).codec == 200
    header, stored = PACKING.seal(meta(1), payload(meta(1)))
    assert len(stored) == 8192
    assert decode_header(header).codec == RAW


def test_two_writes_of_one_block_have_nothing_in_common() -> None:
    (first, stored), (second, stored_again) = (CODECS["encrypted"].seal(meta(1), payload(meta(1))) for _ in range(2))
    assert decode_header(first).sealing != decode_header(second).sealing
    assert bytes(stored) != bytes(stored_again)


@on_all
@given(position=st.integers(min_value=0), flip=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_corrupt(codec: Codec, position: int, flip: int) -> None:
    header, stored = codec.seal(meta(1), compressible(meta(1)))
    meaningful = len(header.rstrip(b"\0"))
    damaged = bytearray(header[:meaningful] + bytes(stored))
    damaged[position % len(damaged)] ^= flip
    page = bytes(damaged[:meaningful]).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(CorruptBlock):
        opened(codec, meta(1), page, damaged[meaningful:])


@on_all
@given(data=st.binary(max_size=400), stored=st.binary(max_size=100))
def test_foreign_bytes_are_corrupt_and_nothing_else(codec: Codec, data: bytes, stored: bytes) -> None:
    with pytest.raises(CorruptBlock):
        opened(codec, meta(1), data, stored)


@on_all
def test_a_record_that_was_cut_short_or_made_longer_is_corrupt(codec: Codec) -> None:
    header, stored = codec.seal(meta(1), compressible(meta(1)))
    for other in (bytes(stored)[:-1], bytes(stored) + b"\0", b""):
        with pytest.raises(CorruptBlock, match="are stored, expected"):
            opened(codec, meta(1), header, other)


@on_all
def test_the_record_of_another_block_is_corrupt(codec: Codec) -> None:
    """Two records of one length that were swapped whole, header and all."""
    header, stored = codec.seal(meta(2), compressible(meta(2)))
    with pytest.raises(CorruptBlock, match="another block"):
        opened(codec, meta(1), header, stored)


@on_encrypting
def test_whoever_has_no_key_cannot_pass_one_record_off_as_another(codec: Codec) -> None:
    """The checksums need no secret: a forger can make them fit."""
    header, stored = codec.seal(meta(2), compressible(meta(2)))
    forged = encode_header(replace(decode_header(header), meta=meta(1)))
    with pytest.raises(CorruptBlock, match="authentication tag"):
        opened(codec, meta(1), forged, stored)
    other, _ = codec.seal(meta(1), payload(meta(1)))
    for change in ({"tag": bytes(16)}, {"sealing": decode_header(other).sealing}):
        forged = encode_header(replace(decode_header(header), **change))  # type: ignore[arg-type]
        with pytest.raises(CorruptBlock, match="authentication tag"):
            opened(codec, meta(2), forged, stored)
    tampered = bytes(stored)[::-1]
    forged = encode_header(replace(decode_header(header), checksum=checksum(tampered)))
    with pytest.raises(CorruptBlock, match="authentication tag"):
        opened(codec, meta(2), forged, tampered)


@on_encrypting
def test_another_key_or_none_is_no_damage_and_damage_shows_without_the_key(codec: Codec) -> None:
    header, stored = codec.seal(meta(1), compressible(meta(1)))
    for reader in (replace(codec, keys=KeyRing(OTHER)), replace(codec, keys=None)):
        with pytest.raises(WrongKey):
            opened(reader, meta(1), header, stored)
        with pytest.raises(CorruptBlock, match="checksum"):
            opened(reader, meta(1), header, bytes(len(stored)))


def test_with_a_key_what_is_not_encrypted_is_refused_unless_it_is_allowed() -> None:
    header, stored = PLAIN.seal(meta(1), payload(meta(1)))
    with pytest.raises(WrongKey, match="not encrypted"):
        opened(Codec(KeyRing(KEY)), meta(1), header, stored)
    lenient = Codec(KeyRing(KEY, accepts_plain=True))
    assert opened(lenient, meta(1), header, stored) == payload(meta(1))


def test_old_keys_read_what_they_wrote() -> None:
    header, stored = Codec(KeyRing(OTHER)).seal(meta(1), payload(meta(1)))
    assert opened(Codec(KeyRing(KEY, [OTHER])), meta(1), header, stored) == payload(meta(1))


def test_a_fault_of_the_transform_shows() -> None:
    header, stored = PACKING.seal(meta(1), compressible(meta(1)))
    with pytest.raises(CorruptBlock, match="after unpacking"):
        opened(replace(PACKING, transforms={200: Forgetful()}), meta(1), header, stored)
    with pytest.raises(CorruptBlock, match="transform 200, which is unknown"):
        opened(PLAIN, meta(1), header, stored)
