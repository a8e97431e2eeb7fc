"""Computing behind a copy that goes layer by layer: the same tokens as without it, whatever becomes of the copy."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from engine.attention import SequenceSlice
from engine.jobs import FetchJob
from engine.layers import LayerGate, layer_ends
from engine.model import Model, load_model, make_pool
from engine.request import PlanMode, Progress, RequestState
from engine.scheduler import Piece
from engine.service import Engine, EngineOptions
from engine.turn import Ask
from kvstore.core.errors import ConfigError
from kvstore.core.outcome import Outcome, TierKind
from tests.engine import tiny
from tests.engine.fakes import FakeClient, FakeStore, continuation
from tests.engine.rig import Answer, Rig
from tests.engine.test_two_ends import NUM_BLOCKS, PROMPT, cached, measured
from tests.support.waiting import until
from tiers.hbm import HbmTier

RAM = TierKind.RAM

# ---------------------------------------------------------------- the gate


def test_a_layer_is_passed_once_it_is_there_and_not_before() -> None:
    gate = LayerGate(patience_s=20.0)
    passed: list[int] = []

    def compute() -> None:
        for layer in range(4):
            gate.wait_for(layer)
            passed.append(layer)

    thread = threading.Thread(target=compute)
    thread.start()
    assert passed == []
    gate.open(3)
    gate.open(4)
    thread.join(10)
    assert passed == [0, 1, 2, 3]
    gate.close(is_whole=True)
    assert gate.came_whole()


def test_who_waits_goes_on_when_the_copy_has_failed_and_learns_of_it_afterwards() -> None:
    gate = LayerGate(patience_s=20.0)
    gate.open(1)
    gate.close(is_whole=False)
    gate.close(is_whole=True)
    gate.wait_for(3)
    assert not gate.came_whole()


def test_a_copy_that_is_stuck_is_given_up_and_does_not_count_when_it_ends_after_all() -> None:
    gate = LayerGate(patience_s=0.0)
    gate.open(1)
    gate.wait_for(0)
    gate.wait_for(1)
    gate.open(2)
    gate.close(is_whole=True)
    assert not gate.came_whole(), "layer 1 was read before it was there"
    assert gate.waited_s >= 0


def test_a_copy_whose_last_word_does_not_come_does_not_count() -> None:
    gate = LayerGate(patience_s=0.0)
    gate.open(2)
    gate.wait_for(1)
    assert not gate.came_whole()


@pytest.mark.parametrize(
    ("mode", "is_cuda", "num_layers", "payload_mib", "ends"),
    [
        ("auto", False, 32, 2.0, []),
        ("off", True, 32, 2.0, []),
        ("auto", True, 32, 2.0, [4, 8, 12, 16, 20, 24, 28, 32]),
        ("auto", True, 80, 20.0, [10, 20, 30, 40, 50, 60, 70, 80]),
        # A transfer should have 256 KiB.
        ("auto", True, 32, 1.0, [8, 16, 24, 32]),
        ("auto", True, 30, 0.703125, [11, 22, 30]),
        ("auto", True, 32, 0.125, []),
        ("on", False, 32, 0.125, [16, 32]),
        ("on", False, 3, 0.01, [2, 3]),
        ("on", False, 1, 2.0, []),
    ],
)
def test_layers_go_in_turns_that_are_worth_a_transfer(
    mode: str, is_cuda: bool, num_layers: int, payload_mib: float, ends: list[int]
) -> None:
    payload_bytes = int(payload_mib * (1 << 20))
    found = layer_ends(mode, is_cuda=is_cuda, num_layers=num_layers, payload_bytes=payload_bytes)  # type: ignore[arg-type]
    assert list(found) == ends


# ---------------------------------------------------------------- the step loop, by hand


def under_copy(rig: Rig, *, patience_s: float = 20.0, prompt: Sequence[int] = PROMPT) -> tuple[Answer, FetchJob]:
    """A request whose blocks all lie in host memory: its mover is about to copy them."""
    _, answer = rig.submit(prompt, 3, cached=cached(*[RAM] * NUM_BLOCKS), plan="fetch")
    assert rig.scheduler.next_step() == []
    job = rig.movers.fetches.popleft()
    assert job.claim(rig.now)
    assert job.begin_last(range(NUM_BLOCKS), LayerGate(patience_s)) == list(range(NUM_BLOCKS))
    return answer, job


def rig_of(num_pool_blocks: int = 30) -> Rig:
    rig = Rig(num_pool_blocks)
    measured(rig)
    return rig


def copied(rig: Rig, job: FetchJob, bad: Sequence[int] = ()) -> None:
    """Be a mover at the end of its copy; the blocks `bad` were not valid any more."""
    (request,) = rig.scheduler._active
    gate = job.layers
    assert gate is not None
    gate.open(1)
    for index in range(NUM_BLOCKS):
        if index not in bad:
            rig.fill(request, job, index)
        job.end(index, Outcome.STALE if index in bad else Outcome.OK, RAM, rig.now)
    gate.close(is_whole=not bad)


def compute(rig: Rig, pieces: Sequence[Piece]) -> None:
    rig.runner._compute(pieces)
    rig.pool.check_integrity()


def test_the_last_chunk_begins_while_the_blocks_in_front_of_it_are_being_copied() -> None:
    rig = rig_of()
    answer, job = under_copy(rig)
    (piece,) = rig.scheduler.next_step()
    assert (piece.start, piece.num_tokens, piece.samples, piece.layers) == (80, 2, True, job.layers)
    assert piece.request.state is RequestState.RUNNING
    copied(rig, job)
    compute(rig, [piece])
    assert answer.tokens == continuation(PROMPT, 1)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)
    result = piece.request.result
    assert result is not None and (result.plan, result.tokens[RAM], result.recomputed) == ("fetch", 80, 2)
    assert rig.counters.snapshot()["overlapped_steps"] == 1
    assert len(rig.caching.planner.loads) == 0


def test_a_block_that_fails_after_the_pass_began_drops_what_was_computed() -> None:
    rig = rig_of()
    answer, job = under_copy(rig)
    (piece,) = rig.scheduler.next_step()
    copied(rig, job, bad=[5, 7])
    compute(rig, [piece])
    assert answer.tokens == []
    assert (rig.counters.snapshot()["dropped_steps"], rig.counters.snapshot().get("steps", 0)) == (1, 0)
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)
    result = piece.request.result
    assert result is not None and (result.plan, result.tokens[RAM]) == ("interval", 72)
    assert result.miss["stale"] == 8


def test_a_copy_that_is_stuck_costs_its_patience_and_may_end_later() -> None:
    rig = rig_of()
    answer, job = under_copy(rig, patience_s=0.0)
    gate = job.layers
    assert gate is not None
    (piece,) = rig.scheduler.next_step()
    compute(rig, [piece])
    assert answer.tokens == [] and rig.counters.snapshot()["dropped_steps"] == 1
    # Not again; its blocks cannot be taken back either while they are being written.
    assert rig.scheduler.next_step() == []
    job.layers = gate
    copied(rig, job)
    job.layers = None
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)
    assert piece.request.result is not None and piece.request.result.tokens[RAM] == 80


def test_a_request_that_is_not_alone_waits_for_its_blocks_and_holds_up_nobody() -> None:
    rig = rig_of()
    other, _ = rig.submit([1, 2, 3], 9)
    rig.step()
    answer, job = under_copy_beside(rig, other.id)
    pieces = rig.scheduler.next_step()
    assert [(piece.request.id, piece.layers) for piece in pieces] == [(other.id, None)]
    compute(rig, pieces)
    gate = job.layers
    assert gate is not None
    for index in range(NUM_BLOCKS):
        rig.fill(rig.scheduler._active[1], job, index)
        job.end(index, Outcome.OK, RAM, rig.now)
    gate.close(is_whole=True)
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)


def under_copy_beside(rig: Rig, other_id: str) -> tuple[Answer, FetchJob]:
    _, answer = rig.submit(PROMPT, 3, cached=cached(*[RAM] * NUM_BLOCKS), plan="fetch")
    pieces = rig.scheduler.next_step()
    assert [piece.request.id for piece in pieces] == [other_id]
    compute(rig, pieces)
    job = rig.movers.fetches.popleft()
    assert job.claim(rig.now)
    assert job.begin_last(range(NUM_BLOCKS), LayerGate(20.0))
    return answer, job


def test_more_than_a_chunk_behind_the_blocks_is_not_begun_early() -> None:
    rig = rig_of(num_pool_blocks=40)
    prompt = [*PROMPT, *range(20)]
    answer, job = under_copy(rig, prompt=prompt)
    assert rig.scheduler.next_step() == []
    copied(rig, job)
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(prompt, 3)


def test_nothing_is_begun_early_where_a_block_has_failed_already() -> None:
    rig = rig_of()
    _, answer = rig.submit(PROMPT, 3, cached=cached(*[RAM] * NUM_BLOCKS), plan="fetch")
    assert rig.scheduler.next_step() == []
    job = rig.movers.fetches.popleft()
    assert job.claim(rig.now)
    job.refuse(3, Outcome.MISS, RAM, rig.now)
    rest = [index for index in range(NUM_BLOCKS) if index != 3]
    gate = LayerGate(20.0)
    assert job.begin_last(rest, gate) == rest
    assert all(piece.layers is None for piece in rig.scheduler.next_step())
    (request,) = rig.scheduler._active
    for index in rest:
        rig.fill(request, job, index)
        job.end(index, Outcome.OK, RAM, rig.now)
    gate.close(is_whole=True)
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)


# ---------------------------------------------------------------- a real model, real threads


class SlowHbm(HbmTier):
    """Copies no layer before a step has come to it: both certainly overlap, and the step must wait. `broken`: only the
    first layers come."""

    reached: list[threading.Event]
    broken = False

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        self.reached[first].wait(10)
        if first and self.broken:
            raise RuntimeError("the device refuses")
        super().scatter_layers(payloads, groups, first, end)


class Watched:
    """A model that says which layers it has come to behind a copy."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spec, self.tokenizer = model.spec, model.tokenizer
        self.reached = [threading.Event() for _ in range(model.spec.num_layers)]

    def forward(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> torch.Tensor:
        return self._model.forward([self._telling(piece) for piece in slices], pool)

    def _telling(self, piece: SequenceSlice) -> SequenceSlice:
        wait = piece.before_layer
        if wait is None:
            return piece

        def tell(layer: int) -> None:
            self.reached[layer].set()
            wait(layer)

        return replace(piece, before_layer=tell)


class Rig3:
    """An engine over a model of three layers whose blocks are in a fake kvstore."""

    def __init__(self, engine: Engine, pool: torch.Tensor, hbm: SlowHbm, store: FakeStore) -> None:
        self.engine = engine
        self.hbm = hbm
        self.store = store
        self._pool = pool
        self._num_asked = 0

    def ask(self, prompt: Sequence[int], plan: PlanMode = "auto") -> list[int]:
        tokens: list[int] = []
        done = threading.Event()

        def listen(progress: Progress) -> None:
            if progress.token_id is not None:
                tokens.append(progress.token_id)
            if progress.finish is not None:
                done.set()

        self._num_asked += 1
        ask = Ask(f"r{self._num_asked}", "", time.monotonic(), prompt=prompt, plan=plan, max_tokens=8, ignore_eos=True)
        self.engine.open(ask, listen)[1].result(10)
        assert done.wait(20)
        return tokens

    def forget(self, num_blocks: int) -> None:
        """Wait until kvstore has so many blocks, and lose all that is in HBM."""
        until(lambda: len(self.store.blocks) >= num_blocks)
        self.engine.between_steps(self.engine.pool.drop).result(10)
        self.engine.between_steps(lambda: self._pool.fill_(float("nan"))).result(10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(tiny.write_folder(tmp_path_factory.mktemp("model"), tiny.llama()), "cpu", "float32")


@contextmanager
def engine_of(model: Model, **options: object) -> Iterator[Rig3]:
    pool = make_pool(model.spec, 64, 4, "cpu")
    hbm = SlowHbm(pool, 4)
    watched = Watched(model)
    hbm.reached = watched.reached
    store = FakeStore(block_bytes=hbm.payload_bytes)
    wanted = EngineOptions(block_tokens=4, pool_block_tokens=4, chunk_tokens=32, layer_overlap="on")
    engine = Engine(
        watched, pool, hbm, replace(wanted, **options), lambda namespace: FakeClient(store, namespace.tenant)  # type: ignore[arg-type]
    )  # fmt: skip
    engine.start()
    try:
        yield Rig3(engine, pool, hbm, store)
    finally:
        engine.stop(2)


def test_a_real_model_says_the_same_behind_a_copy_in_layers(model: Model) -> None:
    prompt = [(11 * i * i + i) % 250 for i in range(46)]
    with engine_of(model) as rig:
        first = rig.ask(prompt)
        rig.forget(11)
        assert rig.ask(prompt, "fetch") == first
        assert rig.engine.counters.snapshot()["overlapped_steps"] == 1
        assert "dropped_steps" not in rig.engine.counters.snapshot()


@pytest.mark.parametrize("fault", ["broken", "stale"])
def test_a_real_model_says_the_same_when_the_copy_fails_in_the_middle(model: Model, fault: str) -> None:
    # One block, so that it is the last one of its fetch.
    prompt = [5, 9, 77, 31, 8, 2]
    with engine_of(model) as rig:
        first = rig.ask(prompt)
        rig.forget(1)
        rig.hbm.broken = fault == "broken"
        rig.store.faults.stale = float(fault == "stale")
        assert rig.ask(prompt, "fetch") == first
        assert rig.engine.counters.snapshot()["dropped_steps"] == 1
        assert "overlapped_steps" not in rig.engine.counters.snapshot()


def test_off_copies_blocks_whole_and_quantised_ones_cannot_be_divided(model: Model) -> None:
    prompt = [(7 * i) % 250 for i in range(22)]
    with engine_of(model, layer_overlap="off") as rig:
        first = rig.ask(prompt)
        rig.forget(5)
        assert rig.ask(prompt, "fetch") == first
        assert not rig.hbm.reached[0].is_set()
    with pytest.raises(ConfigError, match="int8"), engine_of(model, kv_store_dtype="int8"):
        pass
