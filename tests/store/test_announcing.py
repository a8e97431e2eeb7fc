"""What routers are told of blocks that come and go: with tokens or without, once each, and again after a loss."""

from collections.abc import Callable

import numpy as np
import pytest

from kvstore import wire
from kvstore.config import EventsConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import event_name, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.events.changes import Batch
from kvstore.events.vllm_format import encode
from kvstore.store.columns import STORED_TIERS
from kvstore.store.engines import Engine
from tests.support.chats import Prefix, namespace
from tests.support.events import BlockStored, Event, Index, decoder
from tests.support.rig import Rig, memory

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


class Router:
    """An outlet and, at once, what reads at its other end."""

    def __init__(self) -> None:
        self.num_starts = 1
        self.state = "ok"
        self.is_ready = True
        self.takes_more = True
        self.index = Index()
        self.events: list[Event] = []
        self.sequences: list[int] = []

    def send(self, batch: Batch) -> bool:
        if not self.takes_more:
            return False
        events = decoder.decode(encode(batch)).events
        self.sequences.append(batch.sequence)
        self.events += events
        self.index.apply(events)
        return True

    def where(self, prefix: Prefix) -> list[set[str]]:
        return [self.index.where(event_name(key)) for key in prefix.keys]

    @property
    def stored(self) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored)]


def put(rig: Rig, engine: Engine, prefix: Prefix, with_tokens: bool = True) -> None:
    tokens = np.array(prefix.tokens, dtype="<u4").tobytes() if with_tokens else b""
    granted = rig.store.store(engine, wire.Store(join_keys(prefix.keys), NAMESPACE.root(), 0, tokens))
    for slot in granted.slots:
        if slot.outcome == Outcome.OK:
            rig.write(prefix.keys[slot.index], slot)
    if written := [(prefix.keys[slot.index], slot) for slot in granted.slots if slot.outcome == Outcome.OK]:
        rig.commit(engine, written)


def announcing(rig: Rig) -> Router:
    router = Router()
    rig.store.announce(router, rig.clock)
    rig.settle()
    return router


def test_a_stored_prefix_is_told_with_its_tokens_and_where_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    router = announcing(rig)
    prefix = Prefix(NAMESPACE, 1, 4)
    put(rig, rig.attach(NAMESPACE), prefix)
    rig.settle()
    assert router.where(prefix) == [{"ram", "ssd"}] * 4
    first = router.stored[0]
    assert first.token_ids == prefix.tokens
    assert (first.parent_block_hash, first.block_size) == (None, NAMESPACE.block_tokens)
    assert first.block_hashes == [event_name(key) for key in prefix.keys]
    assert {event.medium for event in router.stored} == {"CPU", "STORAGE"}
    assert sum(len(event.token_ids) for event in router.stored) == 2 * len(prefix.tokens)


def test_what_leaves_a_tier_is_told_of_that_tier(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    router = announcing(rig)
    prefix = Prefix(NAMESPACE, 1, 4)
    put(rig, rig.attach(NAMESPACE), prefix)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    rig.settle()
    assert router.where(prefix) == [{"ssd"}] * 4
    rig.store.evict(wire.Evict(["ssd"], drop=True), lambda _: None)
    rig.settle()
    assert router.where(prefix) == [set()] * 4
    assert router.index.copies == {}


def test_what_was_kept_over_a_restart_is_told_after_everything_was_cleared(make_rig: MakeRig) -> None:
    ssd = memory(TierKind.SSD)
    rig = make_rig("first", ssd=ssd)
    prefix = Prefix(NAMESPACE, 1, 6)
    put(rig, rig.attach(NAMESPACE), prefix)
    rig.settle()
    again = make_rig("second", ssd=ssd)
    router = announcing(again)
    assert router.where(prefix) == [{"ssd"}] * 6
    assert router.index.num_cleared == 1
    assert router.sequences[0] == 0


def test_a_batch_that_is_lost_shows_as_a_gap_and_is_made_good(make_rig: MakeRig) -> None:
    rig = make_rig()
    router = announcing(rig)
    engine = rig.attach(NAMESPACE)
    lost, kept = Prefix(NAMESPACE, 1, 3), Prefix(NAMESPACE, 2, 3)
    router.takes_more = False
    put(rig, engine, lost)
    rig.settle()
    router.takes_more = True
    put(rig, engine, kept)
    rig.settle()
    assert router.where(lost) == [set()] * 3
    assert router.where(kept) == [{"ram"}] * 3
    assert router.sequences[-1] - router.sequences[0] >= len(router.sequences)
    assert rig.stats()["events"]["dropped_changes"] == 3
    rig.settle(seconds=40.0)
    assert router.where(lost) == router.where(kept) == [{"ram"}] * 3
    assert router.index.num_cleared == 2


def test_a_publisher_that_was_started_again_is_told_everything(make_rig: MakeRig) -> None:
    rig = make_rig()
    router = announcing(rig)
    engine = rig.attach(NAMESPACE)
    prefixes = [Prefix(NAMESPACE, seed, 3) for seed in range(8)]
    for prefix in prefixes:
        put(rig, engine, prefix)
    rig.settle()
    router.num_starts += 1
    router.index = Index()
    for prefix in prefixes:
        put(rig, engine, prefix)
    rig.settle()
    assert [router.where(prefix) for prefix in prefixes] == [[{"ram"}] * 3] * 8


def test_nothing_is_told_twice_while_everything_is_told_anew(make_rig: MakeRig) -> None:
    """llm-d counts announcements: a block that is told twice and leaves once stays in its index for good."""
    rig = make_rig(ssd=memory(TierKind.SSD), ram_bytes=2000 * 8192)
    engine = rig.attach(NAMESPACE)
    prefixes = [Prefix(NAMESPACE, seed, 40) for seed in range(40)]
    for prefix in prefixes[:30]:
        put(rig, engine, prefix)
    router = Router()
    rig.store.announce(router, rig.clock)
    for prefix in prefixes[30:]:
        rig.turn()
        rig.work()
        put(rig, engine, prefix)
        rig.clock.now += 0.03
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    rig.settle()
    catalog = rig.store._catalog
    assert catalog.blocks_in(TierKind.SSD) == 1600
    for key in (key for prefix in prefixes for key in prefix.keys):
        tiers = {tier.label for tier in STORED_TIERS if catalog.resident(catalog.find(key), tier)}
        assert router.index.where(event_name(key)) == tiers


def test_tokens_are_remembered_within_the_budget_only(make_rig: MakeRig) -> None:
    rig = make_rig(events=EventsConfig(token_memory_bytes=4 * (16 + 250)))
    router = announcing(rig)
    engine = rig.attach(NAMESPACE)
    for seed in range(5):
        put(rig, engine, Prefix(NAMESPACE, seed, 4))
    rig.settle()
    assert rig.stats()["events"]["blocks_with_tokens"] == 4
    assert len(router.stored) >= 5


def test_without_a_budget_no_tokens_are_asked_for_or_told(make_rig: MakeRig) -> None:
    rig = make_rig(events=EventsConfig(token_memory_bytes=0))
    router = announcing(rig)
    prefix = Prefix(NAMESPACE, 1, 4)
    put(rig, rig.attach(NAMESPACE), prefix)
    rig.settle()
    assert router.where(prefix) == [{"ram"}] * 4
    assert all(not event.token_ids for event in router.stored)


def test_tokens_that_do_not_fit_the_keys_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 2).keys
    with pytest.raises(ProtocolError, match="4 ids of 4 bytes"):
        rig.store.store(engine, wire.Store(join_keys(keys), NAMESPACE.root(), 0, b"\0" * 31))
