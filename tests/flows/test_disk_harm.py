"""Somebody removes or damages the SSD tier's files while a real daemon serves."""

import contextlib
from collections.abc import Callable

from kvstore import wire
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome
from tests.flows.test_tiers import take_away
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, fetch, store_all
from tests.support.waiting import until

MakeDaemon = Callable[..., DaemonProcess]
NAMESPACE = namespace()
PREFIX = Prefix(NAMESPACE, 1, 50)


def turn(daemon: DaemonProcess) -> None:
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, PREFIX.keys)
        message = wire.ChatMessage("user", "hello", PREFIX.tokens)
        client.session_put(wire.SessionPut("chat", "", NAMESPACE.digest(), 0, [message], join_keys(PREFIX.keys)))
    until(lambda: durable(daemon) == "ssd")


def durable(daemon: DaemonProcess) -> str:
    with contextlib.closing(daemon.console()) as console:
        return str(console.session_get("chat").durable)


def test_a_folder_that_is_cleared_under_the_daemon_is_made_anew_and_what_ram_has_is_stored_again(
    make_daemon: MakeDaemon,
) -> None:
    """The tier answered UNAVAILABLE until the daemon was restarted; meanwhile the session was shown as durable."""
    daemon = make_daemon()
    turn(daemon)
    take_away(daemon.ssd_dir)
    until(lambda: daemon.errors().get("ssd_lost", 0) >= 50)
    until(lambda: durable(daemon) == "ssd")
    daemon.restart()
    with contextlib.closing(daemon.engine()) as client:
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.OK}
    assert durable(daemon) == "ssd"


def test_an_index_that_is_overwritten_under_the_daemon_begins_anew(make_daemon: MakeDaemon) -> None:
    """Reads and writes failed until the daemon was restarted, and after that the tier could not be opened at all."""
    daemon = make_daemon()
    turn(daemon)
    with contextlib.closing(daemon.engine()) as client:
        client.evict(["ram"])
        path = daemon.ssd_dir / "index.mdb"
        with path.open("r+b") as file:
            file.seek(8192)  # behind the two pages that LMDB looks at when it opens the file
            file.write(b"\xa5" * (path.stat().st_size - 8192))
        assert Outcome.OK not in fetch(client, NAMESPACE, PREFIX.keys)[0]
        until(lambda: daemon.stats()["tiers"]["ssd"]["blocks"] == 0)
        assert durable(daemon) == "none"
        store_all(client, NAMESPACE, PREFIX.keys)
        until(lambda: durable(daemon) == "ssd")
        client.evict(["ram"])
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.OK}
