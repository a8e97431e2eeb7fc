"""Engines that do random things to one small daemon, all at once: no byte is wrong, and others are answered too."""

import contextlib
import random
import threading
from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import Namespace, join_keys
from kvstore.core.outcome import Outcome
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, fetch, store

MakeDaemon = Callable[..., DaemonProcess]
STEPS = 150


class Engine(threading.Thread):
    """One engine of one of two models, with prefixes that the others use too."""

    def __init__(self, client: Client, name_space: Namespace, seed: int) -> None:
        super().__init__()
        self.client = client
        self.namespace = name_space
        self.choice = random.Random(seed)
        self.outcomes: set[Outcome] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self.step()
        except BaseException as error:
            self.failure = error
        finally:
            self.client.close()

    def step(self) -> None:
        prefix = Prefix(self.namespace, self.choice.randrange(30), self.choice.randint(1, 60))
        kind = self.choice.random()
        if kind < 0.4:
            self.outcomes |= set(store(self.client, self.namespace, prefix.keys))
        elif kind < 0.8:
            found = len(self.client.lookup(prefix.keys).tiers)
            if found:
                deadline_s = self.choice.choice((0.02, 1.0, 5.0))
                self.outcomes |= set(fetch(self.client, self.namespace, prefix.keys[:found], deadline_s)[0])
        elif kind < 0.97:
            self.session(prefix)
        else:
            with contextlib.suppress(TierUnavailable):
                self.client.evict(["ram"])

    def session(self, prefix: Prefix) -> None:
        session_id = f"chat-{self.choice.randrange(8)}"
        view = self.client.session_get(session_id)
        if view is not None and self.choice.random() < 0.2:
            # Another engine may have deleted it first.
            with contextlib.suppress(ProtocolError):
                self.client.session_delete(session_id, namespace=self.namespace.digest())
            return
        put = wire.SessionPut(
            session_id,
            "",
            self.namespace.digest(),
            0 if view is None else view.revision,
            [wire.ChatMessage("user", "text", prefix.tokens)],
            join_keys(prefix.keys),
        )
        self.client.session_put(put)


@pytest.mark.parametrize("seed", range(2))
def test_engines_that_do_as_they_like_never_get_a_wrong_byte(make_daemon: MakeDaemon, seed: int) -> None:
    daemon = make_daemon(ram_size="3MiB", ssd_max_bytes="16MiB", ssd_segment_bytes="1MiB", sessions_max_sessions=10)
    models = [namespace(), namespace("another", block_bytes=20_000)]
    roots = [daemon.engine(model) for model in models]
    engines = [Engine(roots[i % 2].clone(), models[i % 2], 10 * seed + i) for i in range(5)]
    for root in roots:
        root.ping()  # attached, so that a fetch with a short deadline is about blocks
    for engine in engines:
        engine.start()
    with contextlib.closing(daemon.console()) as console:
        for engine in engines:
            while engine.is_alive():
                assert console.ping() > 0
                engine.join(0.01)
    for engine in engines:
        assert engine.failure is None, engine.failure
    for root in roots:
        root.close()
    seen = set().union(*(engine.outcomes for engine in engines))
    assert {Outcome.OK, Outcome.EXISTS} <= seen
    assert not seen & {Outcome.CORRUPT, Outcome.REJECTED, Outcome.STALE, Outcome.UNAVAILABLE}
    stats = daemon.stats()
    assert stats["daemon"]["engines"] == 0 and stats["tiers"]["ram"]["queue"] == 0
    assert set(stats["errors"]) <= {"ssd_write_full", "session_conflict"}
    assert daemon.stop() == 0
    daemon.start()
    for model in models:
        with contextlib.closing(daemon.engine(model)) as client:
            for number in range(30):
                keys = Prefix(model, number, 60).keys
                found = len(client.lookup(keys).tiers)
                if found:
                    assert set(fetch(client, model, keys[:found])[0]) == {Outcome.OK}
    assert daemon.errors() == {}
