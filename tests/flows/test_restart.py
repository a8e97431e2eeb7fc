"""The daemon is killed, stopped and started again under engines that go on."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.key import BlockKey, join_keys
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, fetch, ignoring_faults, store, store_all
from tests.support.waiting import PATIENCE_S, until

MakeDaemon = Callable[..., DaemonProcess]
NAMESPACE = namespace()


class Writer(threading.Thread):
    """An engine that stores prefix after prefix; from time to time it notes what the daemon says is on SSD."""

    def __init__(self, daemon: DaemonProcess, number: int) -> None:
        super().__init__()
        self.client = daemon.engine()
        self.number = number
        self.on_ssd: set[BlockKey] = set()
        self.prefixes: list[Prefix] = []
        self.is_over = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with contextlib.suppress(TierUnavailable):
                for number in range(1_000_000):
                    if self.is_over.is_set():
                        return
                    self.prefixes.append(Prefix(NAMESPACE, 1000 * self.number + number, 8))
                    store(self.client, NAMESPACE, self.prefixes[-1].keys)
                    self.look(self.prefixes[-min(len(self.prefixes), 6)])
        except BaseException as error:
            self.failure = error
        finally:
            self.client.close()

    def look(self, prefix: Prefix) -> None:
        """What RAM holds too is shown as in RAM, so empty that first."""
        self.client.evict(["ram"])
        found = self.client.lookup(prefix.keys)
        self.on_ssd.update(key for key, tier in zip(prefix.keys, found.tiers, strict=False) if tier == TierKind.SSD)


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_in_the_middle_of_stores_loses_nothing_that_was_shown_as_on_ssd(
    make_daemon: MakeDaemon, seed: int
) -> None:
    daemon = make_daemon(ssd_max_bytes="1GiB")  # or what is shown may be evicted before the kill
    moment = random.Random(seed)
    writers = [Writer(daemon, number) for number in range(3)]
    for writer in writers:
        writer.start()
    until(lambda: all(writer.on_ssd for writer in writers))
    some_more = sum(len(writer.prefixes) for writer in writers) + moment.randint(0, 20)
    until(lambda: sum(len(writer.prefixes) for writer in writers) >= some_more)
    daemon.kill()
    for writer in writers:
        writer.is_over.set()
        writer.join()
        assert writer.failure is None
    daemon.start()
    with contextlib.closing(daemon.engine()) as client:
        for writer in writers:
            for prefix in writer.prefixes:
                found = client.lookup(prefix.keys)
                shown = prefix.keys[: len(found.tiers)]
                if shown:
                    assert set(fetch(client, NAMESPACE, shown)[0]) == {Outcome.OK}
                for key in writer.on_ssd & set(prefix.keys):
                    assert fetch(client, NAMESPACE, [key])[0] == [Outcome.OK]
    assert daemon.errors() == {}


def test_sigterm_writes_down_what_is_only_in_ram(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ram_size="32MiB")
    prefix = Prefix(NAMESPACE, 1, 2000)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        assert daemon.stop() == 0
        daemon.start()
        assert client.lookup(prefix.keys).tiers == [TierKind.SSD] * 2000
        assert set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK}
    assert daemon.stop() == 0
    assert "written down" not in daemon.log.read_text()


def test_sigterm_twice_stops_at_once(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        ssd_enabled="false", s3_bucket="nobody", s3_endpoint="http://127.0.0.1:9", daemon_drain_deadline="600s"
    )
    prefix = Prefix(NAMESPACE, 1, 4)
    with contextlib.closing(daemon.engine()) as client:
        store(client, NAMESPACE, prefix.keys)
        session_put(client, prefix)
    daemon.process.terminate()
    until(lambda: "draining" in daemon.log.read_text())
    assert daemon.process.poll() is None
    daemon.process.terminate()
    daemon.process.wait(PATIENCE_S)


def session_put(client: Client, prefix: Prefix) -> None:
    client.session_put(
        wire.SessionPut(
            "chat",
            "",
            NAMESPACE.digest(),
            0,
            [wire.ChatMessage("user", "text", prefix.tokens)],
            join_keys(prefix.keys),
        )
    )


def test_a_second_daemon_in_the_same_folder_is_refused_and_the_first_goes_on(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    assert "another daemon runs in" in daemon.start_refused()
    with contextlib.closing(daemon.console()) as console:
        assert console.ping() > 0


def test_a_client_goes_on_by_itself_after_the_daemon_was_restarted(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 8)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        region = client.region
        daemon.kill()
        for _ in range(20):
            with pytest.raises(TierUnavailable):
                client.lookup(prefix.keys, deadline_s=600.0)  # a daemon that is known to be dead is not waited for
        client.report(None)  # type: ignore[arg-type]
        client.observe({"unknown": 1})
        daemon.start()
        assert client.lookup(prefix.keys).tiers == [TierKind.SSD] * 8
        assert client.region is not region
        assert set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK}
        daemon.restart()
        # Without a failure in between: the old epoch is refused, and the client attaches anew.
        assert len(client.lookup(prefix.keys).tiers) == 8


def test_grants_and_leases_of_another_boot_are_void(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    first, second = Prefix(NAMESPACE, 1, 4), Prefix(NAMESPACE, 2, 4)
    with contextlib.closing(daemon.engine()) as client, contextlib.closing(daemon.engine()) as other:
        store_all(client, NAMESPACE, first.keys)
        grant = client.store(second.keys, NAMESPACE.root(), 0)
        stream = other.fetch(first.keys, PATIENCE_S)
        (landed, *_) = stream.landed(PATIENCE_S)
        daemon.restart()
        written = [block.generation for block in grant.blocks]
        assert client.commit(second.keys, written, [True] * 4) == [Outcome.STALE] * 4
        assert client.lookup(second.keys).tiers == []
        assert landed.view is not None and len(bytes(landed.view)) == 8192  # no SIGBUS
        stream.release()
        assert other.lookup(second.keys).tiers == []
        assert set(store(client, NAMESPACE, second.keys)) == {Outcome.OK}


def test_clones_share_one_attachment_and_each_finds_the_new_daemon(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ssd_max_bytes="1GiB")
    prefix = Prefix(NAMESPACE, 1, 4)
    root = daemon.engine()
    clients = [root.clone() for _ in range(6)]
    store_all(root, NAMESPACE, prefix.keys)
    daemon.wait_written()
    assert daemon.stats()["daemon"]["engines"] == 1
    failures: list[BaseException] = []
    is_over = threading.Event()
    seeds = itertools.count(2)  # what is stored must be new to each daemon, also to the last

    def use(client: Client) -> None:
        try:
            while not is_over.wait(0.002):
                with contextlib.suppress(TierUnavailable):
                    # Stale: the daemon was killed after they had landed, and another clone has attached to the next.
                    assert set(fetch(client, NAMESPACE, prefix.keys)[0]) <= {Outcome.OK, Outcome.STALE}
                with contextlib.suppress(TierUnavailable):
                    store(client, NAMESPACE, Prefix(NAMESPACE, next(seeds), 4).keys)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for _ in range(3):
        daemon.restart()
        until(lambda: daemon.stats()["store"]["blocks_stored"] > 20)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert daemon.stats()["daemon"]["engines"] == 1
    for client in (*clients, root):
        client.close()
    assert daemon.stats()["daemon"]["engines"] == 0
    assert "engine_died" not in daemon.errors()
    assert os.listdir(daemon.run_dir / "clients") == []


def test_a_killed_daemon_leaves_no_process_behind(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(http_enabled="true", http_port=0)
    worker = daemon.worker("ssd")
    daemon.kill()
    until(lambda: not Path(f"/proc/{worker}/cmdline").exists() or not Path(f"/proc/{worker}/cmdline").read_bytes())
    daemon.start()


def test_the_socket_and_the_region_are_for_this_user_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with contextlib.closing(daemon.engine()) as client:
        client.ping()
        assert client.region is not None
        for path in (daemon.run_dir / "control.sock", daemon.run_dir / "daemon.lock", client.region.path):
            assert path.stat().st_mode & 0o077 == 0, path
    assert daemon.run_dir.stat().st_mode & 0o077 == 0
    daemon.stop()
    daemon.run_dir.chmod(0o755)
    assert "open to other users" in daemon.start_refused()


def test_a_client_whose_daemon_hangs_gives_up_by_its_deadline(make_daemon: MakeDaemon) -> None:
    """Attaching held a lock while it waited, so that of eight threads the last one waited eight deadlines."""
    daemon = make_daemon()
    root = daemon.engine(deadline_s=1.0)
    clients = [root.clone() for _ in range(8)]
    daemon.process.send_signal(signal.SIGSTOP)
    waits: list[float] = []

    def ask(client: Client) -> None:
        started = time.monotonic()
        with contextlib.suppress(KVStoreError):
            client.lookup(Prefix(NAMESPACE, 1, 1).keys)
        waits.append(time.monotonic() - started)

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    daemon.process.send_signal(signal.SIGCONT)
    assert len(waits) == 8 and max(waits) < 5.0
    for client in (root, *clients):
        until(lambda client=client: client.ping() > 0)
        client.close()


def test_a_grant_whose_commit_was_not_answered_does_not_block_its_block_for_ever(make_daemon: MakeDaemon) -> None:
    """The message was lost with the socket, and a grant lasts as long as its engine: PENDING, for days."""
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 4)
    with contextlib.closing(daemon.engine(deadline_s=3.0)) as client:
        grant = client.store(prefix.keys, NAMESPACE.root(), 0)
        daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TierUnavailable):
            client.commit(prefix.keys, [block.generation for block in grant.blocks], [True] * 4)
        daemon.process.send_signal(signal.SIGCONT)
        until(lambda: set(store(client, NAMESPACE, prefix.keys)) <= {Outcome.OK, Outcome.EXISTS})


def test_an_unused_client_can_be_closed_twice(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(is_started=False)
    client = daemon.engine()
    client.close()
    client.close()
    ignoring_faults(client.ping)
