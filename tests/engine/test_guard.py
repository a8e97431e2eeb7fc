"""What is refused before a body is understood: keys, addresses, bodies that are too long or do not come."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from engine.guard import read_api_keys, read_body
from engine.turn import Refused
from kvstore.core.errors import ConfigError
from kvstore.core.hosts import is_loopback


def test_loopback_is_known_by_address_and_name() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))


def test_key_files_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nkey-of-the-first-one\nkey-of-the-other-one other # theirs\n\n")
    assert read_api_keys(path, "") == {"key-of-the-first-one": "", "key-of-the-other-one": "other"}
    for text, what in [
        ("short\n", "line 1"),
        ("# none\n", "holds no key"),
        ("a-long-enough-key a b\n", "line 1"),
        ("key-of-the-first-one\nkey-of-the-first-one x", "line 2"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=what):
            read_api_keys(path, "")
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_keys(tmp_path / "missing", "")


def request_of(*messages: dict[str, Any]) -> Request:
    waiting = list(messages)

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 408),
        ([{"type": "http.request", "body": b"{", "more_body": True}], 408),
        ([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], 400),
        ([{"type": "http.request", "body": b"x" * 11, "more_body": True}], 413),
    ],
)
def test_a_body_that_does_not_come_is_given_up(messages: list[dict[str, Any]], status: int) -> None:
    """A client that sent half of a body and then nothing was waited for for ever; one that went away meanwhile left a
    traceback in the log."""
    with pytest.raises(Refused) as caught:
        asyncio.run(read_body(request_of(*messages), max_bytes=10, deadline_s=0.05))
    assert caught.value.status == status
