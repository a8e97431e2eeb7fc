"""Who may read events over CURVE: the files of keys, and the answers to ZMQ's questions."""

from pathlib import Path

import pytest
import zmq
import zmq.utils.z85

from kvstore.core.errors import ConfigError
from kvstore.events.admission import judge, read_public_keys, read_secret_key

PUBLIC, SECRET = zmq.curve_keypair()


def question(key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"7", b"", b"127.0.0.1", b"", mechanism, zmq.utils.z85.decode(key)]


def test_a_key_that_is_listed_is_let_in_and_no_other() -> None:
    other, _ = zmq.curve_keypair()
    assert judge(question(PUBLIC), frozenset([PUBLIC]))[:3] == [b"1.0", b"7", b"200"]
    assert judge(question(other), frozenset([PUBLIC]))[2] == b"400"
    assert judge(question(PUBLIC, b"NULL"), frozenset([PUBLIC]))[2] == b"400"
    assert judge([b"1.0", b"7"], frozenset([PUBLIC]))[2] == b"400"


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    secret, clients = tmp_path / "secret", tmp_path / "clients"
    secret.write_bytes(SECRET + b"\n")
    secret.chmod(0o600)
    other, _ = zmq.curve_keypair()
    clients.write_bytes(PUBLIC + b"\n\n" + other + b"\n")
    assert read_secret_key(str(secret)) == SECRET
    assert read_public_keys(str(clients)) == {PUBLIC, other}


def test_files_that_hold_no_keys_are_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for content in (b"", b"secret words", SECRET + b"\n" + SECRET, b'"' * 40):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="one secret key") as failed:
            read_secret_key(str(path))
        assert content != b"secret words" or "secret words" not in str(failed.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_public_keys(str(tmp_path / "none"))


def test_a_secret_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret_key(str(path))
