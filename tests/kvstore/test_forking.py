"""A process with a client forks: parent and child are two clients from then on."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from kvstore import wire
from kvstore.client import Client
from kvstore.core.outcome import Outcome
from tests.support.chats import Prefix
from tests.support.daemons import DaemonProcess
from tests.support.fake_daemon import FakeDaemon
from tests.support.messages import NAMESPACE
from tests.support.waiting import PATIENCE_S

KEYS = Prefix(NAMESPACE, 1, 2).keys


def in_child(action: Callable[[], object]) -> bool:
    """Whether the action went well and returned something true, in a child process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if action() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_a_child_asks_over_a_connection_of_its_own(tmp_path: Path) -> None:
    """Both counted on from the same sequence number, and on one connection each took the other's answer for its own:
    another prompt's slots for its blocks."""
    with FakeDaemon(tmp_path) as daemon, contextlib.closing(Client(tmp_path, deadline_s=PATIENCE_S)) as client:
        daemon.answer = lambda request: [wire.Pong(1)]
        client.ping()
        before = len(daemon._socket)
        connections: list[int] = []

        def answer(request: wire.Request) -> list[wire.Message]:
            connections.append(len(daemon._socket))
            return [wire.Pong(1)]

        daemon.answer = answer
        assert in_child(lambda: client.ping() > 0)
        client.ping()
        assert before == 1 and connections[0] == 2


def test_a_child_that_closes_its_client_leaves_the_parents_grants_alone(tmp_path: Path) -> None:
    """It detached the parent, whose slots went to others while the parent wrote into them."""
    daemon = DaemonProcess(tmp_path, {})
    daemon.start()
    try:
        with contextlib.closing(daemon.engine(NAMESPACE)) as client:
            grant = client.store(KEYS, NAMESPACE.root(), 0)

            def close() -> bool:
                client.close()
                return True

            assert in_child(close)
            assert client.commit(KEYS, [block.generation for block in grant.blocks], [True, True]) == [Outcome.OK] * 2
            assert in_child(lambda: client.lookup(KEYS).next == Outcome.OK)
    finally:
        assert daemon.stop() == 0
        daemon.close()


def test_a_child_may_not_commit_what_the_parent_was_granted(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, {})
    daemon.start()
    try:
        with contextlib.closing(daemon.engine(NAMESPACE)) as client:
            grant = client.store(KEYS, NAMESPACE.root(), 0)
            generations = [block.generation for block in grant.blocks]
            assert in_child(lambda: client.commit(KEYS, generations, [True, True]) == [Outcome.STALE] * 2)
            assert client.commit(KEYS, generations, [True, True]) == [Outcome.OK] * 2
    finally:
        assert daemon.stop() == 0
        daemon.close()
