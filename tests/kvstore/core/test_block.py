from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.block import (
    HEADER_BYTES,
    RAW,
    BlockMeta,
    Header,
    Sealing,
    associated_data,
    decode_header,
    encode_header,
)
from kvstore.core.errors import CorruptBlock
from kvstore.core.key import BlockKey

META = BlockMeta(BlockKey(b"k" * 32), BlockKey(b"p" * 32), b"n" * 32, 7, 4096)
SEALING = Sealing(b"i" * 8, b"s" * 16, b"o" * 12)
HEADERS = [
    Header(META, 4096, 123),
    Header(META, 4096, 123, RAW, SEALING, b"t" * 16),
    Header(META, 100, 123, 1),
    Header(replace(META, depth=0, payload_bytes=2**40), 2**40, 2**64 - 1),
]
MEANINGFUL_BYTES = len(encode_header(HEADERS[1]).rstrip(b"\0"))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_is_one_page_and_says_what_was_put_into_it(header: Header) -> None:
    page = encode_header(header)
    assert len(page) == HEADER_BYTES
    assert decode_header(page) == header


@pytest.mark.parametrize("position", range(MEANINGFUL_BYTES))
def test_every_flipped_byte_is_noticed(position: int) -> None:
    page = bytearray(encode_header(HEADERS[1]))
    page[position] ^= 1
    with pytest.raises(CorruptBlock):
        decode_header(page)


@given(st.binary(max_size=600), st.integers(0, 600))
def test_foreign_bytes_are_corrupt_and_nothing_else(data: bytes, overwritten: int) -> None:
    page = bytearray(encode_header(HEADERS[0]))
    page[overwritten : overwritten + len(data)] = data
    for candidate in (data, bytes(page)):
        try:
            decode_header(candidate)
        except CorruptBlock:
            continue
        assert candidate[:MEANINGFUL_BYTES] == encode_header(HEADERS[0])[:MEANINGFUL_BYTES]


@pytest.mark.parametrize("length", [0, 1, 100, MEANINGFUL_BYTES - 1])
def test_a_header_that_was_cut_off_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptBlock, match="shorter than a header"):
        decode_header(encode_header(HEADERS[1])[:length])


@pytest.mark.parametrize("header", [Header(META, 4097, codec=1), Header(META, 4095), Header(META, 0)])
def test_lengths_that_cannot_be_are_corrupt_before_anybody_reads_so_much(header: Header) -> None:
    with pytest.raises(CorruptBlock, match="do not fit together"):
        decode_header(encode_header(header))


def test_a_header_of_another_format_says_so() -> None:
    page = bytearray(encode_header(HEADERS[0]))
    page[8:12] = (1).to_bytes(4, "little")
    with pytest.raises(CorruptBlock, match="format version 1"):
        decode_header(page)


def test_whatever_tells_records_apart_is_authenticated() -> None:
    header = HEADERS[1]
    others = [
        replace(header, meta=replace(META, key=META.parent)),
        replace(header, meta=replace(META, parent=META.key)),
        replace(header, meta=replace(META, namespace=bytes(32))),
        replace(header, meta=replace(META, depth=8)),
        replace(header, meta=replace(META, payload_bytes=4097)),
        replace(header, stored_bytes=4095),
        replace(header, codec=1),
        replace(header, sealing=None),
        replace(header, sealing=replace(SEALING, nonce=b"x" * 12)),
        replace(header, sealing=replace(SEALING, salt=b"x" * 16)),
        replace(header, sealing=replace(SEALING, key_id=b"x" * 8)),
    ]
    assert len({associated_data(each) for each in [header, *others]}) == 12
