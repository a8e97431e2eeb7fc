"""A real daemon and a router: what it is told, live and again, over ipc, TCP and CURVE."""

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from kvstore.client import Client
from kvstore.core.key import event_name
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, parents, payload, until
from tests.support.events import BlockStored, Index, Subscriber

MakeDaemon = Callable[..., DaemonProcess]
NAMESPACE = namespace()


def put(client: Client, prefix: Prefix) -> None:
    tokens = np.array(prefix.tokens, dtype="<u4").tobytes()
    keys = prefix.keys
    grant = client.store(keys, parents(NAMESPACE, keys)[0], 0, tokens=tokens)
    for key, block in zip(keys, grant.blocks, strict=True):
        assert block.view is not None
        block.view[:] = payload(key)
    client.commit(keys, [block.generation for block in grant.blocks], [True] * len(keys))


def where(index: Index, prefix: Prefix) -> list[set[str]]:
    return [index.where(event_name(key)) for key in prefix.keys]


def heard(router: Subscriber, prefix: Prefix) -> list[set[str]]:
    router.read()
    return where(router.index, prefix)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(client: Client, router: Subscriber) -> None:
    """Until the router hears what is published now: one that connects late has missed it for good."""
    seeds = itertools.count(1000)

    def hears() -> bool:
        put(client, Prefix(NAMESPACE, next(seeds), 1))
        return router.read()

    until(hears)


def publisher(daemon: DaemonProcess) -> int:
    for child in Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split():
        if b"kvstore.events.publisher" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


def test_a_router_knows_what_is_where_through_stores_evictions_and_a_restart(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    live, again = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    daemon = make_daemon(events_endpoint=live, events_replay_endpoint=again, events_topic="kv@pod@model")
    prefix, other = Prefix(NAMESPACE, 1, 8), Prefix(NAMESPACE, 2, 8)
    with contextlib.closing(Subscriber(live, "kv@pod@")) as router, contextlib.closing(daemon.engine()) as engine:
        engine.ping()
        put(engine, prefix)
        assert engine.wants_tokens
        until(lambda: router.replay(again, 0) and where(router.index, prefix) == [{"ram", "ssd"}] * 8)
        join(engine, router)
        router.index = Index()
        router.replay(again, 0)
        stored = [event for event in router.events if isinstance(event, BlockStored)]
        assert stored[0].token_ids == prefix.tokens
        put(engine, other)
        until(lambda: heard(router, other) == [{"ram", "ssd"}] * 8)
        engine.evict(["ram"])
        until(lambda: heard(router, prefix) == [{"ssd"}] * 8)
        daemon.restart()
        router.sequences.clear()
        until(lambda: router.replay(again, 0) and where(router.index, prefix) == [{"ssd"}] * 8)
        assert router.sequences[0] == 0


def test_a_router_that_missed_messages_sees_it_and_asks_for_them(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    live, again = f"tcp://127.0.0.1:{free_port()}", f"ipc://{tmp_path}/replay"
    daemon = make_daemon(events_endpoint=live, events_replay_endpoint=again)
    prefixes = [Prefix(NAMESPACE, seed, 4) for seed in range(6)]
    with contextlib.closing(daemon.engine()) as engine:
        for prefix in prefixes[:3]:
            put(engine, prefix)
        with contextlib.closing(Subscriber(live)) as late:
            until(lambda: late.replay(again, 0) and where(late.index, prefixes[2]) == [{"ram", "ssd"}] * 4)
            missed = max(late.sequences) + 1
            put(engine, prefixes[3])
            put(engine, prefixes[4])
            until(lambda: late.replay(again, missed))
            assert min(late.sequences[-1:]) >= missed


def test_a_publisher_that_is_killed_is_started_again_and_tells_everything_anew(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    live, again = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    daemon = make_daemon(events_endpoint=live, events_replay_endpoint=again)
    prefix = Prefix(NAMESPACE, 1, 4)
    with contextlib.closing(daemon.engine()) as engine, contextlib.closing(Subscriber(live)) as router:
        put(engine, prefix)
        first = until(lambda: publisher(daemon))
        os.kill(first, signal.SIGKILL)
        until(lambda: publisher(daemon) not in (0, first))
        assert engine.ping() > 0
        until(lambda: router.replay(again, 0) and where(router.index, prefix) == [{"ram", "ssd"}] * 4)


def test_only_who_has_a_key_that_is_listed_reads_events_on_an_open_address(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    server, server_secret = zmq.curve_keypair()
    ours, our_secret = zmq.curve_keypair()
    strangers, strangers_secret = zmq.curve_keypair()
    secret_file, clients_file = tmp_path / "secret", tmp_path / "clients"
    secret_file.write_bytes(server_secret)
    secret_file.chmod(0o600)
    clients_file.write_bytes(ours + b"\n")
    port = free_port()
    daemon = make_daemon(
        events_endpoint=f"tcp://0.0.0.0:{port}",
        events_curve_secret_key_file=secret_file,
        events_curve_clients_file=clients_file,
    )
    address = f"tcp://127.0.0.1:{port}"
    with (
        contextlib.closing(Subscriber(address, curve=(server, ours, our_secret))) as known,
        contextlib.closing(Subscriber(address, curve=(server, strangers, strangers_secret))) as stranger,
        contextlib.closing(Subscriber(address)) as plain,
        contextlib.closing(daemon.engine()) as engine,
    ):
        for seed in range(50):
            put(engine, Prefix(NAMESPACE, seed, 2))
            if known.read():
                break
        assert known.events
        assert not stranger.read(0.0)
        assert not plain.read(0.0)


def test_events_on_an_open_address_without_keys_are_refused_at_the_start(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(is_started=False, events_endpoint="tcp://*:5557")
    assert "events.curve_secret_key_file" in daemon.start_refused()


def test_keys_that_cannot_be_read_are_refused_at_the_start(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon(
        is_started=False,
        events_endpoint="tcp://*:5557",
        events_curve_secret_key_file=tmp_path / "none",
        events_curve_clients_file=tmp_path / "none",
    )
    assert "events.curve_secret_key_file: cannot read" in daemon.start_refused()


def test_a_publisher_that_cannot_start_leaves_the_daemon_serving(make_daemon: MakeDaemon) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = make_daemon(events_endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        until(lambda: daemon.stats()["events"]["state"] == "off")
        assert "events cannot be published" in daemon.log.read_text()
        prefix = Prefix(NAMESPACE, 1, 4)
        with contextlib.closing(daemon.engine()) as engine:
            put(engine, prefix)
            assert len(engine.lookup(prefix.keys).tiers) == 4
