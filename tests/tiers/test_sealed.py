"""Records as they are stored: damage, mix-ups and forgeries show, and the text is not there to be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import CorruptBlock, WrongKey
from tiers.keys import KeyRing
from tiers.sealed import check_record, open_record, seal_record

KEY = KeyRing(bytes(range(32)))
on_both = pytest.mark.parametrize("keys", [None, KEY], ids=["plain", "encrypted"])


@on_both
@given(data=st.binary(max_size=1000), name=st.text("abc/", min_size=1, max_size=20))
def test_a_record_comes_back(keys: KeyRing | None, data: bytes, name: str) -> None:
    assert open_record(keys, name, seal_record(keys, name, data)) == data


@on_both
def test_every_flipped_byte_and_every_missing_one_is_noticed(keys: KeyRing | None) -> None:
    sealed = seal_record(keys, "name", b"what people wrote")
    for position in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[position] ^= 1
        for damaged in (bytes(flipped), sealed[:position]):
            with pytest.raises(CorruptBlock):
                check_record(keys, "name", damaged)


@on_both
@given(st.binary(max_size=200))
def test_foreign_bytes_are_corrupt_and_nothing_else(keys: KeyRing | None, data: bytes) -> None:
    for sealed in (data, b"KVR2" + data):
        with pytest.raises(CorruptBlock):
            open_record(keys, "name", sealed)


@on_both
def test_the_record_of_another_name_is_corrupt(keys: KeyRing | None) -> None:
    with pytest.raises(CorruptBlock):
        open_record(keys, "name", seal_record(keys, "other", b"data"))


def test_an_encrypted_record_shows_nothing_of_its_text_and_differs_every_time() -> None:
    first, second = (seal_record(KEY, "name", b"what people wrote") for _ in range(2))
    assert b"people" not in first
    assert first[-17:] != second[-17:]


def test_damage_shows_without_the_key() -> None:
    sealed = seal_record(KEY, "name", b"what people wrote")
    with pytest.raises(WrongKey):
        check_record(None, "name", sealed)
    with pytest.raises(CorruptBlock):
        check_record(None, "name", sealed[:-1] + b"?")
