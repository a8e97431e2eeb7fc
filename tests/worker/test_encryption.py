"""Where the keys come from, and where they do not go."""

from pathlib import Path

import pytest

from kvstore.config import KEY_VARIABLE, EncryptionConfig
from kvstore.core.errors import ConfigError
from kvstore.worker.encryption import load_keys, without_key
from tiers.keys import key_id

KEY, OTHER = bytes(range(32)), bytes(range(50, 82))


def key_file(folder: Path, key: bytes, name: str = "key") -> str:
    path = folder / name
    path.write_text(key.hex())
    path.chmod(0o600)
    return str(path)


def test_without_file_and_variable_there_is_no_encryption() -> None:
    assert load_keys(EncryptionConfig(), {}) is None


def test_the_key_may_come_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    in_file = EncryptionConfig(key_file=key_file(tmp_path, KEY))
    for ring in (load_keys(in_file, {}), load_keys(EncryptionConfig(), {KEY_VARIABLE: KEY.hex()})):
        assert ring is not None
        assert ring.key_id == key_id(KEY)
        assert not ring.accepts_plain
    with pytest.raises(ConfigError, match="are both set"):
        load_keys(in_file, {KEY_VARIABLE: KEY.hex()})


def test_a_variable_that_holds_no_key_is_named_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} holds no key") as caught:
        load_keys(EncryptionConfig(), {KEY_VARIABLE: "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_old_keys_alone_encrypt_nothing(tmp_path: Path) -> None:
    old = key_file(tmp_path, OTHER, "old")
    with pytest.raises(ConfigError, match="needs a key to encrypt with"):
        load_keys(EncryptionConfig(old_key_files=(old,)), {})
    ring = load_keys(EncryptionConfig(key_file=key_file(tmp_path, KEY), old_key_files=(old,), accept_plain=True), {})
    assert ring is not None
    assert ring.key_id == key_id(KEY)
    assert ring.accepts_plain


def test_a_process_that_needs_no_key_gets_none() -> None:
    assert without_key({KEY_VARIABLE: "x", "PATH": "/bin"}) == {"PATH": "/bin"}
