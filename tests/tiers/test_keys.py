"""Encryption keys: what is accepted as one, who may read the file, and that nothing is ever encrypted alike twice."""

import base64
import logging
from pathlib import Path

import pytest

from kvstore.core.block import Sealing
from kvstore.core.errors import ConfigError, CorruptBlock, WrongKey
from tiers import keys as module
from tiers.keys import KeyRing, key_id, read_key_file

KEY = bytes(range(100, 132))
OTHER = bytes(range(32))


def key_file(folder: Path, content: bytes) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def encrypted(ring: KeyRing, data: bytes, associated: bytes = b"name") -> tuple[Sealing, bytes, bytes]:
    sealing, into = ring.draw(), bytearray(len(data))
    tag = ring.encrypt(sealing, associated, data, memoryview(into))
    return sealing, tag, bytes(into)


def decrypted(ring: KeyRing, sealing: Sealing, tag: bytes, data: bytes, associated: bytes = b"name") -> bytes:
    into = bytearray(len(data))
    ring.decrypt(sealing, associated, tag, data, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY), base64.b64encode(KEY) + b"\n"],
)
def test_a_key_file_may_be_raw_hex_or_base64(tmp_path: Path, content: bytes) -> None:
    assert read_key_file(key_file(tmp_path, content)) == KEY


@pytest.mark.parametrize("content", [b"", b"hunter2", KEY[:31], KEY + b"\n", b"ab" * 31, b"ab" * 33, b"x" * 10_000])
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="holds no key: 32 bytes are needed") as caught:
        read_key_file(key_file(tmp_path, content))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEY)
    Path(path).chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_key_file(path)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file"):
        read_key_file(str(tmp_path / "nowhere"))


def test_after_a_rotation_old_messages_are_read_and_new_ones_have_the_new_key() -> None:
    before = encrypted(KeyRing(KEY), b"data")
    ring = KeyRing(OTHER, [KEY])
    assert decrypted(ring, *before) == b"data"
    assert encrypted(ring, b"data")[0].key_id == key_id(OTHER)


def test_another_key_is_told_from_damage() -> None:
    sealing, tag, data = encrypted(KeyRing(KEY), b"data")
    with pytest.raises(WrongKey, match=key_id(KEY).hex()):
        decrypted(KeyRing(OTHER), sealing, tag, data)
    for damaged in [(tag, b"DATA"), (bytes(16), data)]:
        with pytest.raises(CorruptBlock, match="tag"):
            decrypted(KeyRing(KEY), sealing, *damaged)
    with pytest.raises(CorruptBlock, match="tag"):
        decrypted(KeyRing(KEY), sealing, tag, data, b"another name")


def test_data_can_be_decrypted_in_its_place() -> None:
    ring = KeyRing(KEY)
    sealing, tag, data = encrypted(ring, b"x" * 10_000)
    place = memoryview(bytearray(data))
    ring.decrypt(sealing, b"name", tag, place, place)
    assert place == b"x" * 10_000


def test_no_two_messages_have_the_same_nonce_and_subkey() -> None:
    first, second = KeyRing(KEY), KeyRing(KEY)
    drawn = [ring.draw() for ring in (first, second) for _ in range(1000)]
    assert len(set(drawn)) == 2000
    assert len({sealing.salt for sealing in drawn}) == 2, "every process has a subkey of its own"


def test_a_subkey_is_left_long_before_a_nonce_could_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.MESSAGES_PER_SUBKEY <= 1 << 32
    monkeypatch.setattr(module, "MESSAGES_PER_SUBKEY", 2)
    ring = KeyRing(KEY)
    messages = [encrypted(ring, b"data") for _ in range(5)]
    assert [sealing.salt == messages[0][0].salt for sealing, _, _ in messages] == [True, True, False, False, False]
    assert {decrypted(ring, *message) for message in messages} == {b"data"}


def test_only_so_many_subkeys_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SUBKEYS", 3)
    messages = [encrypted(KeyRing(KEY), b"data") for _ in range(5)]
    ring = KeyRing(KEY)
    for message in [*messages, *messages]:
        assert decrypted(ring, *message) == b"data"
    assert len(ring._subkeys) == 3


def test_nothing_of_a_key_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing(KEY, [OTHER])
    with caplog.at_level(logging.DEBUG):
        encrypted(ring, b"data")
    shown = f"{ring!r} {ring.key_id.hex()} {caplog.text}"
    assert KEY.hex()[:12] not in shown
    assert KEY.hex()[:16] != ring.key_id.hex()
