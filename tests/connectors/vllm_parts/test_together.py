"""Both sides of the connector under an engine that checks every block it reads: whatever happens, no wrong KV."""

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore.connectors.vllm_parts.settings import LoadMode, Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.key import BlockKey, engine_keys
from kvstore.core.outcome import TierKind
from policies.decision import check
from tests.support.vllm import (
    BLOCK_TOKENS,
    FakeRequest,
    MemoryDaemon,
    hashes_of,
    kv_of,
    namespace,
)
from tests.support.vllm_engine import FakeEngine, start_engine

SETTINGS = Settings(Path("/nowhere"), plan="fetch", num_loaders=2)


class Rig:
    """Engines that share a daemon; `start` is another process of vLLM with an empty KV cache."""

    def __init__(self) -> None:
        self.daemon = MemoryDaemon()
        self.counters = Counters()
        # Stored, and damaged since.
        self.damaged: list[bytearray] = []
        self._engines: list[FakeEngine] = []

    def start(self, settings: Settings = SETTINGS, **options: int) -> FakeEngine:
        """`options` as in `start_engine`."""
        engine = start_engine(settings, lambda _: self.daemon.client(), self.counters, **options)
        self._engines.append(engine)
        return engine

    def damage(self, key: BlockKey, place: int = 0) -> None:
        slot = self.daemon.slots[key]
        slot[place] ^= 4
        self.damaged.append(slot)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        assert self.daemon.open_clients == 0

    def counted(self) -> dict[str, int]:
        report = self.counters.take()
        return {} if report is None else dict(report["counts"])

    def check(self) -> None:
        """Every stored block is what its key says, but for those that were damaged since."""
        texts = [text for engine in self._engines for text in engine.texts]
        names = {name for text in texts for name in hashes_of(text)}
        known: dict[bytes, bytes] = {}
        for engine in self._engines:
            for era, salt in enumerate(engine.salts):
                for rank in range(len(engine.workers)):
                    root = namespace(rank, len(engine.workers)).root()
                    for name in names:
                        known[engine_keys(root, [salted(name, salt)])[0]] = bytes(kv_of(name, rank, era))
        for key, slot in self.daemon.slots.items():
            if not any(slot is each for each in self.damaged):
                assert bytes(slot).startswith(known[key]), "something else was stored"


def salted(name: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(salt + name).digest() if salt else name


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture(params=["async", "sync"])
def settings(request: pytest.FixtureRequest) -> Settings:
    mode: LoadMode = request.param
    return replace(SETTINGS, load=mode)


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(97) for _ in range(num_tokens)]


def run(engine: FakeEngine, *requests: FakeRequest, max_tokens: int = 4) -> None:
    for request in requests:
        engine.add(request, max_tokens)
    engine.run()
    engine.close_workers()


def test_another_process_loads_every_full_block_and_goes_on_with_the_same_tokens(rig: Rig, settings: Settings) -> None:
    first, second = rig.start(settings), rig.start(settings)
    run(first, FakeRequest("a", prompt(50)))
    second.add(FakeRequest("a", prompt(50)))
    second.run()
    second.scheduler.close()
    assert second.outputs == first.outputs
    assert second.external_tokens == 48
    report = rig.daemon.reports[-1]
    assert (report.hbm, report.ram, report.recomputed) == (0, 48, 2)
    assert report.plan == "fetch"
    assert report.decision is not None
    assert report.decision.happened is not None
    check(report.decision)
    assert report.decision.happened.loaded == {TierKind.RAM: 12}


def test_the_daemon_hears_the_tokens_of_its_blocks_where_it_wants_them(rig: Rig, settings: Settings) -> None:
    """For routers that follow its events."""
    run(rig.start(settings), FakeRequest("a", prompt(50)))
    assert not rig.daemon.told_tokens
    rig.daemon.wants_tokens = True
    run(rig.start(settings), FakeRequest("b", prompt(50, seed=2)))
    stored = len(rig.daemon.told_tokens) // 4
    assert 48 <= stored <= 56
    assert rig.daemon.told_tokens[: 48 * 4] == np.array(prompt(48, seed=2), dtype="<u4").tobytes()


@pytest.mark.parametrize(("load", "expected"), [("async", 48), ("sync", 44)])
def test_a_prompt_of_full_blocks_leaves_a_step_something_to_compute(rig: Rig, load: LoadMode, expected: int) -> None:
    settings = replace(SETTINGS, load=load)
    run(rig.start(settings), FakeRequest("a", prompt(48)))
    engine = rig.start(settings)
    engine.add(FakeRequest("a", prompt(48)))
    engine.run()
    assert engine.external_tokens == expected


def test_blocks_of_the_answer_are_stored_too(rig: Rig) -> None:
    engine = rig.start()
    run(engine, FakeRequest("a", prompt(10)), max_tokens=20)
    # The last token was sampled but not computed.
    assert len(rig.daemon.slots) == (10 + 20 - 1) // BLOCK_TOKENS


def test_what_vllm_itself_has_is_not_loaded(rig: Rig) -> None:
    run(rig.start(), FakeRequest("a", prompt(50)))
    engine = rig.start()
    engine.add(FakeRequest("short", prompt(50)[:21]))
    engine.run()
    loaded = engine.external_tokens
    engine.add(FakeRequest("long", prompt(50)))
    engine.run()
    assert loaded == 20
    assert engine.external_tokens - loaded == 28


def test_what_the_daemon_dropped_in_front_of_the_rest_does_not_hide_it(rig: Rig) -> None:
    run(rig.start(), FakeRequest("a", prompt(50)))
    engine = rig.start()
    engine.add(FakeRequest("short", prompt(50)[:21]))
    engine.run()
    before = engine.external_tokens
    head = engine_keys(namespace().root(), hashes_of(prompt(50)))[1]
    del rig.daemon.slots[head]
    engine.add(FakeRequest("long", prompt(50)))
    engine.run()
    assert engine.external_tokens - before == 28
    engine.close_workers()
    assert head in rig.daemon.slots, "it was not offered again"


def test_a_damaged_block_is_computed_again(rig: Rig, settings: Settings) -> None:
    run(rig.start(settings), FakeRequest("a", prompt(50)))
    key = engine_keys(namespace().root(), hashes_of(prompt(50)))[5]
    rig.daemon.slots[key][0] ^= 1
    engine = rig.start(settings)
    engine.add(FakeRequest("a", prompt(50)))
    engine.run()
    assert engine.recomputed >= 28
    engine.scheduler.close()
    report = rig.daemon.reports[-1]
    assert (report.ram, report.recomputed) == (20, 30)
    assert report.miss == {"partial_block": 2, "failed": 28}
    assert report.decision is not None
    assert report.decision.happened is not None
    check(report.decision)
    assert (report.decision.happened.usable, report.decision.happened.failed) == (5, 7)
    assert rig.counted()["failed_blocks|corrupt"] == 1
    engine.close_workers()
    assert bytes(rig.daemon.slots[key]).startswith(bytes(kv_of(hashes_of(prompt(50))[5]))), "it was not healed"


def test_nothing_is_stored_that_was_computed_over_a_block_that_did_not_come(rig: Rig) -> None:
    """A load before the step that fails lets the step compute over garbage. vLLM takes the step back, but a store of
    its blocks would have kept the garbage under a good key, for every engine."""
    settings = replace(SETTINGS, load="sync")
    run(rig.start(settings), FakeRequest("a", prompt(50)))
    rig.damage(engine_keys(namespace().root(), hashes_of(prompt(50)))[5])
    longer = prompt(50) + prompt(40, seed=2)
    engine = rig.start(settings)
    engine.add(FakeRequest("b", longer))
    engine.run()
    engine.close_workers()
    rig.check()


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_block_that_did_not_come_is_not_found_by_the_next_prompt(rig: Rig, is_aborted: bool) -> None:
    """vLLM has the blocks of a load before the step in its prefix cache before they are filled, and leaves them there
    when it fails: the request that was to compute them again was aborted, or preempted, and others read garbage."""
    settings = replace(SETTINGS, load="sync")
    run(rig.start(settings), FakeRequest("a", prompt(50)))
    rig.damage(engine_keys(namespace().root(), hashes_of(prompt(50)))[2])
    engine = rig.start(settings, budget=8)
    engine.add(FakeRequest("b", prompt(50)))
    while not engine.recomputed:
        engine.step()
    if is_aborted:
        engine.abort(engine.queue[0])
    else:
        engine.preempt(engine.queue[0])
    # Asks for other blocks than those, so that nobody loads them again.
    rig.daemon.slots.clear()
    run(engine, FakeRequest("c", prompt(50) + prompt(9, seed=3)))
    rig.check()


def test_where_the_daemon_is_away_everything_is_computed(rig: Rig, settings: Settings) -> None:
    rig.daemon.is_away = True
    engine = rig.start(settings)
    engine.add(FakeRequest("a", prompt(50)))
    engine.run()
    assert engine.external_tokens == 0
    assert rig.counted()["consults|unavailable"] == 1


def test_once_the_daemon_is_back_it_is_used_again(rig: Rig) -> None:
    rig.daemon.is_away = True
    engine = rig.start()
    engine.add(FakeRequest("a", prompt(50)))
    engine.run()
    rig.daemon.is_away = False
    engine.add(FakeRequest("b", prompt(50)))
    engine.run()
    engine.close_workers()
    assert len(rig.daemon.slots) >= 12


def test_a_session_is_recorded_with_all_its_blocks_and_goes_on(rig: Rig) -> None:
    engine = rig.start()
    params = {"session_id": "chat", "hints": {"expect_followup": True, "ttl": 60}}
    engine.add(FakeRequest("a", prompt(20), params))
    engine.run()
    answer = engine.outputs["a"]
    second = prompt(20) + answer + prompt(9, seed=3)
    engine.add(FakeRequest("b", second, params))
    engine.run()
    engine.scheduler.close()
    put = rig.daemon.sessions["chat"]
    assert put.revision == 1
    assert [len(message.token_ids) for message in put.messages] == [24, 13]
    assert [token for message in put.messages for token in message.token_ids] == second + engine.outputs["b"]
    assert put.expect_followup
    assert put.ttl_s == 60.0
    assert len(put.keys) // 32 == (len(second) + 4 - 1) // BLOCK_TOKENS


def test_another_process_goes_on_with_a_session_at_its_revision(rig: Rig) -> None:
    params = {"session_id": "chat"}
    first = rig.start()
    first.add(FakeRequest("a", prompt(20), params))
    first.run()
    first.scheduler.close()
    second = rig.start()
    second.add(FakeRequest("b", prompt(20) + first.outputs["a"] + [5], params))
    second.run()
    second.scheduler.close()
    assert rig.daemon.sessions["chat"].revision == 1
    assert len(rig.daemon.sessions["chat"].messages) == 2


def test_a_prompt_that_does_not_go_on_from_the_session_begins_its_messages_anew(rig: Rig) -> None:
    params = {"session_id": "chat"}
    engine = rig.start()
    engine.add(FakeRequest("a", prompt(20), params))
    engine.run()
    engine.add(FakeRequest("b", prompt(30, seed=9), params))
    engine.run()
    engine.scheduler.close()
    assert len(rig.daemon.sessions["chat"].messages) == 1


def test_hints_without_a_session_go_to_the_prompts_blocks(rig: Rig) -> None:
    engine = rig.start()
    engine.add(FakeRequest("a", prompt(20), {"hints": {"end": True}}))
    engine.run()
    engine.scheduler.close()
    assert rig.daemon.hints[0]["end"] is True


def test_after_a_reset_nothing_of_before_is_found(rig: Rig) -> None:
    engine = rig.start()
    engine.add(FakeRequest("a", prompt(50)))
    engine.run()
    engine.take_new_weights()
    engine.add(FakeRequest("b", prompt(50)))
    engine.run()
    assert engine.external_tokens == 0
    engine.drop_prefix_cache()
    engine.add(FakeRequest("c", prompt(50)))
    engine.run()
    assert engine.external_tokens == 48


def test_plan_recompute_loads_nothing_and_stores_all_the_same(rig: Rig) -> None:
    settings = replace(SETTINGS, plan="recompute")
    run(rig.start(settings), FakeRequest("a", prompt(50)))
    assert len(rig.daemon.slots) == 13
    engine = rig.start(settings)
    engine.add(FakeRequest("a", prompt(50)))
    engine.run()
    assert engine.external_tokens == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("load", "depth"), [("sync", 1), ("async", 1), ("async", 2)])
@pytest.mark.parametrize("seed", range(4))
def test_no_wrong_kv_is_read_or_stored_whatever_happens(
    rig: Rig, load: LoadMode, depth: int, ranks: int, seed: int
) -> None:
    """Preemptions, aborts, new weights, damaged and vanished blocks, ranks whose loads end in other steps, and a daemon
    that comes and goes, with a KV cache that is too small for the requests: the engine compares every block that it
    reads."""
    choice = random.Random(seed)
    settings = replace(SETTINGS, load=load, hold_s=0.01)
    stems = [prompt(choice.randrange(8, 60), seed=100 * seed + n) for n in range(4)]
    for round_ in range(3):
        engine = rig.start(
            settings,
            num_blocks=choice.choice([24, 40, 80]),
            budget=choice.choice([8, 24, 64]),
            ranks=ranks,
            depth=depth,
        )
        if load == "async":
            engine.pages[-1].before_scatter = partial(_be_late, engine)
        for number in range(12):
            tokens = choice.choice(stems)[: choice.randrange(6, 60)] + prompt(
                choice.randrange(1, 12), seed=choice.randrange(5)
            )
            engine.add(FakeRequest(f"{round_}-{number}", tokens), choice.randrange(1, 10))
            for _ in range(choice.randrange(6)):
                engine.step()
                _harm(rig, engine, choice)
        rig.daemon.is_away = False
        engine.run()
        engine.close_workers()
    assert rig.daemon.slots
    rig.check()


def _be_late(engine: FakeEngine) -> None:
    """End a load some steps later than the other ranks do."""
    until = engine.num_steps + 3
    while engine.num_steps < until and not engine.is_idle:
        threading.Event().wait(0.0005)


def _harm(rig: Rig, engine: FakeEngine, choice: random.Random) -> None:
    match choice.randrange(16):
        case 0 | 1 if engine.queue:
            engine.abort(choice.choice(engine.queue))
        case 2:
            running = [each for each in engine.queue if each.state == "running"]
            if running:
                engine.preempt(choice.choice(running))
        case 3 | 4 if rig.daemon.slots:
            rig.damage(choice.choice(list(rig.daemon.slots)), choice.randrange(64))
        case 5 if rig.daemon.slots:
            rig.daemon.slots.pop(choice.choice(list(rig.daemon.slots)), None)
        case 6:
            rig.daemon.is_away = not rig.daemon.is_away
        case 7:
            engine.drop_prefix_cache()
        case 8 if choice.randrange(3) == 0:
            engine.take_new_weights()


def test_a_daemon_that_says_nothing_delays_a_request_by_its_deadline_from_its_turn_on(rig: Rig) -> None:
    settings = replace(SETTINGS, deadline_s=0.05)
    go_on = threading.Event()
    rig.daemon.before_lookup = lambda: hold_until(go_on)
    engine = rig.start(settings)
    request = FakeRequest("a", prompt(50))
    engine.add(request)
    began_s = time.monotonic()
    assert engine.scheduler.match(request, 0) == (None, False)
    while engine.scheduler.match(request, 0) == (None, False):
        assert time.monotonic() < began_s + 20
    assert engine.scheduler.match(request, 0) == (0, False)
    assert time.monotonic() >= began_s + 0.05
    go_on.set()
    engine.run()
    assert rig.counted()["consults|timed_out"] == 1


def hold_until(go_on: threading.Event) -> None:
    assert go_on.wait(30)
