"""Engines are killed while they hold slots; others go on, and nobody takes one block for another."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.outcome import Outcome
from tests.support.chats import Prefix, namespace, payload
from tests.support.daemons import DaemonProcess, fetch, store, store_all
from tests.support.waiting import PATIENCE_S, until

MakeDaemon = Callable[..., DaemonProcess]
NAMESPACE = namespace()
# 512 blocks in RAM and none elsewhere; the oldest go first, since what the default policy keeps depends on how long
# everything took.
SMALL = {"ram_size": "4MiB", "ram_policy": "lru", "ssd_enabled": "false"}


@contextlib.contextmanager
def engine(daemon: DaemonProcess, what: str, seed: int, num_blocks: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds so many grants or leases, killed at the end if it still lives."""
    command = [sys.executable, "-m", "tests.support.engine_process", str(daemon.run_dir), what, str(seed)]
    with subprocess.Popen([*command, str(num_blocks)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"holding {num_blocks}\n"
            yield process
        finally:
            process.kill()


def test_what_a_killed_engine_was_writing_the_next_may_write(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 8)
    with contextlib.closing(daemon.engine()) as client:
        with engine(daemon, "grants", 1, 8) as dying:
            assert store(client, NAMESPACE, prefix.keys) == [Outcome.PENDING] * 8
            assert client.lookup(prefix.keys).next == Outcome.PENDING
            assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.PENDING] * 8
            assert daemon.stats()["daemon"]["engines"] == 2
            dying.kill()
            until(lambda: store(client, NAMESPACE, prefix.keys) == [Outcome.OK] * 8)
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 8
        assert daemon.errors() == {"engine_died": 1}
        assert daemon.stats()["daemon"]["engines"] == 1


def test_slots_that_a_killed_engine_had_pinned_come_back(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, Prefix(NAMESPACE, 1, 450).keys)
        with engine(daemon, "leases", 1, 450) as dying:
            busy = store(client, NAMESPACE, Prefix(NAMESPACE, 2, 100).keys)
            assert Outcome.BUSY in busy
            dying.kill()
            until(lambda: daemon.stats()["daemon"]["engines"] == 1)
            store_all(client, NAMESPACE, Prefix(NAMESPACE, 3, 400).keys)
        assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, 3, 400).keys)[0]) == {Outcome.OK}


def test_an_engine_that_stands_still_keeps_its_grants(make_daemon: MakeDaemon) -> None:
    """No timer may take a slot from under a copy that is only slow."""
    daemon = make_daemon(**SMALL)
    with (
        contextlib.closing(daemon.engine()) as client,
        contextlib.closing(daemon.engine()) as slow,
    ):
        prefix = Prefix(NAMESPACE, 1, 4)
        grant = slow.store(prefix.keys, NAMESPACE.root(), 0)
        for seed in range(2, 8):
            store(client, NAMESPACE, Prefix(NAMESPACE, seed, 400).keys)
        until(lambda: daemon.stats()["daemon"]["uptime_s"] > 1.5)
        assert store(client, NAMESPACE, prefix.keys) == [Outcome.PENDING] * 4
        for key, block in zip(prefix.keys, grant.blocks, strict=True):
            assert block.view is not None
            block.view[:] = payload(key)
        generations = [block.generation for block in grant.blocks]
        assert slow.commit(prefix.keys, generations, [True] * 4) == [Outcome.OK] * 4
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 4


def test_a_slot_that_is_used_again_under_a_late_reader_is_found_out(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL)
    with contextlib.closing(daemon.engine()) as reader, contextlib.closing(daemon.engine()) as writer:
        prefix = Prefix(NAMESPACE, 1, 4)
        store_all(reader, NAMESPACE, prefix.keys)
        with reader.fetch(prefix.keys, PATIENCE_S) as stream:
            landed = []
            while not stream.done:
                landed += stream.landed(PATIENCE_S)
            assert all(stream.still_valid(block) for block in landed)
            # Given back before they were read: the mistake, or the expired lease, that the generation is for.
            stream.release_blocks([block.index for block in landed])
            for seed in range(2, 6):
                store_all(writer, NAMESPACE, Prefix(NAMESPACE, seed, 400).keys)
            assert writer.lookup(prefix.keys).tiers == []
            assert not any(stream.still_valid(block) for block in landed)
        until(lambda: daemon.errors() == {"stale_slot": 4})


def test_what_has_landed_stays_when_only_the_connection_ends(make_daemon: MakeDaemon) -> None:
    """A client drops it after a silence, and may be copying still: its copies must not turn into misses by that."""
    daemon = make_daemon(**SMALL)
    with contextlib.closing(daemon.engine()) as reader, contextlib.closing(daemon.engine()) as writer:
        prefix = Prefix(NAMESPACE, 1, 450)
        store_all(reader, NAMESPACE, prefix.keys)
        with reader.fetch(prefix.keys, PATIENCE_S) as stream:
            landed = []
            while not stream.done:
                landed += stream.landed(PATIENCE_S)
            reader._connection.close()
            assert Outcome.BUSY in store(writer, NAMESPACE, Prefix(NAMESPACE, 2, 400).keys)
            assert all(stream.still_valid(block) for block in landed)
        # Left, it has released them by a connection of its own.
        until(lambda: Outcome.BUSY not in store(writer, NAMESPACE, Prefix(NAMESPACE, 3, 400).keys))


def test_an_engine_of_another_model_shares_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 4)
    other = namespace("another")
    with contextlib.closing(daemon.engine()) as client, contextlib.closing(daemon.engine(other)) as stranger:
        store_all(client, NAMESPACE, prefix.keys)
        assert stranger.lookup(prefix.keys).tiers == []
        assert fetch(stranger, other, prefix.keys)[0] == [Outcome.MISS] * 4
        assert store(stranger, other, prefix.keys) == [Outcome.REJECTED] * 4
        assert client.lookup(prefix.keys).next == Outcome.OK


def test_blocks_that_do_not_fit_into_ram_are_refused_with_what_to_do(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL)
    large = namespace(block_bytes=2 << 20)
    with contextlib.closing(daemon.engine(large)) as client, pytest.raises(ProtocolError, match=r"ram\.size"):
        client.lookup(Prefix(large, 1, 1).keys)
