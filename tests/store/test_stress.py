"""Everything at once on one store with tiny tiers that fail: nothing wrong is served, and nothing leaks."""

import random
from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.config import SessionsConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.engines import Engine
from tests.support.chats import BLOCK_TOKENS, Prefix, namespace
from tests.support.rig import Fetch, Rig, memory
from tiers.faulty import FaultyTier, SeededPlan

STEPS = 500


class User:
    """Several engines that do random things; what lands is checked by the rig."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.choice = random.Random(seed)
        self.namespaces = [namespace(), namespace("other", block_bytes=20_000)]
        self.engines: list[tuple[Engine, Namespace]] = []
        self.fetches: list[Fetch] = []
        self.grants: list[tuple[Engine, list[tuple[BlockKey, wire.Slot]], Namespace]] = []
        self.revisions: dict[tuple[bytes, str], int] = {}
        self.replies: list[wire.Message] = []
        self.num_asked = 0

    def step(self) -> None:
        if not self.engines:
            return self.attach()
        actions: dict[Callable[[], None], int] = {
            self.attach: 1,
            self.kill: 1,
            self.kill_worker: 1,
            self.grant: 12,
            self.commit: 12,
            self.fetch: 12,
            self.copy: 12,
            self.lookup: 4,
            self.put_session: 8,
            self.get_session: 4,
            self.pin_session: 1,
            self.delete_session: 2,
            self.evict: 1,
            self.wait: 10,
            self.work: 20,
        }
        self.choice.choices(list(actions), list(actions.values()))[0]()

    def finish(self) -> None:
        """Let go of everything."""
        for fetch in self.fetches:
            fetch.given_up = True
        for engine, _ in self.engines:
            self.rig.die(engine)
        self.engines.clear()
        self.rig.settle(seconds=70)

    def attach(self) -> None:
        if len(self.engines) < 4:
            name_space = self.choice.choice(self.namespaces)
            self.engines.append((self.rig.attach(name_space), name_space))

    def kill(self) -> None:
        engine, _ = self.engines.pop(self.choice.randrange(len(self.engines)))
        for fetch in self.fetches:
            fetch.given_up = fetch.given_up or fetch.engine is engine
        self.rig.die(engine)
        self.rig.turn()
        self.fetches = [fetch for fetch in self.fetches if fetch.engine is not engine]
        self.grants = [grant for grant in self.grants if grant[0] is not engine]

    def kill_worker(self) -> None:
        alive = [link for link in self.rig.links.values() if link.ready and link._gone_at is None]
        if alive:
            self.choice.choice(alive).die()

    def prefix(self, name_space: Namespace) -> list[BlockKey]:
        return Prefix(name_space, self.choice.randrange(8), self.choice.randint(1, 12)).keys

    def engine(self) -> tuple[Engine, Namespace]:
        return self.choice.choice(self.engines)

    def grant(self) -> None:
        engine, name_space = self.engine()
        keys = self.prefix(name_space)
        start = self.choice.randrange(len(keys))
        slots = self.rig.grant(engine, name_space, keys, start)
        granted = [(keys[start + slot.index], slot) for slot in slots if slot.outcome == Outcome.OK]
        if granted:
            self.grants.append((engine, granted, name_space))

    def commit(self) -> None:
        if self.grants:
            engine, granted, name_space = self.grants.pop(self.choice.randrange(len(self.grants)))
            is_written = self.choice.random() < 0.9
            for key, slot in granted:
                self.rig.write(key, slot, name_space.block_bytes)
            expected = Outcome.OK if is_written else Outcome.CANCELLED
            assert set(self.rig.commit(engine, granted, is_written)) == {expected}

    def fetch(self) -> None:
        engine, name_space = self.engine()
        keys = self.prefix(name_space)
        self.fetches.append(self.rig.begin_fetch(engine, keys, self.choice.choice((0.05, 0.5, 30.0))))

    def copy(self) -> None:
        if self.fetches:
            fetch = self.choice.choice(self.fetches)
            fetch.copy(release=self.choice.random() < 0.7)
            if self.choice.random() < 0.5:
                fetch.copy()
                fetch.release()
                self.fetches.remove(fetch)

    def lookup(self) -> None:
        engine, name_space = self.engine()
        self.rig.lookup(engine, self.prefix(name_space))

    def put_session(self) -> None:
        engine, name_space = self.engine()
        prefix = Prefix(name_space, self.choice.randrange(8), self.choice.randint(1, 12))
        session_id = f"chat-{self.choice.randrange(6)}"
        revision = self.revisions.get((name_space.digest(), session_id), 0) - (self.choice.random() < 0.1)
        put = wire.SessionPut(
            session_id,
            "",
            name_space.digest(),
            max(0, revision),
            [wire.ChatMessage("user", "text", prefix.tokens)],
            join_keys(prefix.keys),
        )
        assert len(prefix.keys) * BLOCK_TOKENS == len(prefix.tokens)
        saved = self.rig.store.session_put(engine, put)
        if not saved.forked:
            self.revisions[name_space.digest(), session_id] = saved.revision

    def session(self) -> tuple[str, bytes]:
        return f"chat-{self.choice.randrange(6)}", self.choice.choice(self.namespaces).digest()

    def asked(self, ask: Callable[[Callable[[wire.Message], None]], None]) -> None:
        """Every request gets exactly one answer."""
        answers: list[wire.Message] = []

        def reply(message: wire.Message) -> None:
            assert not answers
            answers.append(message)
            self.replies.append(message)

        self.num_asked += 1
        try:
            ask(reply)
        except ProtocolError:
            assert not answers
            self.num_asked -= 1

    def get_session(self) -> None:
        session_id, digest = self.session()
        request = wire.SessionGet(session_id, "", digest, self.choice.choice((0.1, 2.0)))
        self.asked(lambda reply: self.rig.store.sessions.get(request, reply))

    def pin_session(self) -> None:
        session_id, digest = self.session()
        pinned = self.choice.random() < 0.5
        self.asked(lambda reply: self.rig.store.sessions.pin(wire.SessionPin(session_id, pinned, "", digest), reply))

    def delete_session(self) -> None:
        session_id, digest = self.session()
        self.revisions.pop((digest, session_id), None)
        self.asked(lambda reply: self.rig.store.sessions.delete(wire.SessionDelete(session_id, "", digest), reply))

    def evict(self) -> None:
        known = ["ram", *(tier.label for tier in self.rig.links)]
        tiers = self.choice.sample(known, self.choice.randint(1, min(2, len(known))))
        order = wire.Evict(tiers, self.choice.random() < 0.3)
        self.asked(lambda reply: self.rig.store.evict(order, reply))

    def wait(self) -> None:
        self.rig.turn()
        self.rig.clock.now += self.choice.choice((0.0, 0.02, 0.3))
        self.rig.turn()

    def work(self) -> None:
        for link in self.rig.links.values():
            link.work(self.choice.randint(0, 4))
        self.rig.turn()


@pytest.mark.parametrize("tiers", ["ssd", "ssd s3", "s3", ""])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_nothing_wrong_is_served_and_nothing_leaks(
    make_rig: Callable[..., Rig], seed: int, tiers: str
) -> None:
    rate = 0.1 if seed % 2 else 0.0
    disk, bucket = memory(TierKind.SSD, 25), memory(TierKind.S3)
    rig = make_rig(
        ram_bytes=40 * 8192,
        ssd=FaultyTier(disk, SeededPlan(seed, rate)) if "ssd" in tiers else None,
        s3=FaultyTier(bucket, SeededPlan(seed + 1, rate)) if "s3" in tiers else None,
        sessions=SessionsConfig(ttl_s=40.0, max_sessions=7),
    )
    user = User(rig, seed)
    for _ in range(STEPS):
        user.step()
    user.finish()
    rig.check()
    assert len(user.replies) == user.num_asked
    assert not len(rig.store._leases) and not len(rig.store._loader) and not len(rig.store._fetches)
    assert disk.most_bytes <= 25 * 8192
    if rate == 0.0:
        catalog = rig.store._catalog
        assert {catalog.key(block) for block in catalog.blocks_resident(TierKind.SSD)} <= set(disk.blocks)
    for name_space in user.namespaces:
        engine = rig.attach(name_space)
        for number in range(8):
            rig.fetch(engine, Prefix(name_space, number, 12).keys)
    rig.check()
