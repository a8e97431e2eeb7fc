"""What computing and loading cost in this engine, learned from vLLM's own steps and loads, and kept between runs.

Not thread-safe: the scheduler's thread owns it, but for `save`.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvstore.connectors.vllm_parts.orders import News
from kvstore.core.outcome import TierKind
from policies import saved_profile
from policies.cost import CostModel, PrefillCost, SavedCosts, StepWork
from policies.interval import Question
from policies.plan import Backlog, Plan, choose, pinned
from policies.saved_profile import SavedProfile

_SAVE_EVERY_S = 300.0
# Steps whose output never came, such as those of a paused engine, must not be taken for slow ones.
_MAX_STEPS_UNDER_WAY = 8


class Costs:
    """`profile` names what is measured; `folder` None: nothing is kept."""

    def __init__(self, profile: SavedProfile, folder: Path | None, clock: Callable[[], float]) -> None:
        self._profile = profile
        self._folder = folder
        self._clock = clock
        saved = None if folder is None else saved_profile.load(folder, profile)
        self.model = CostModel(profile.chunk_tokens, clock, None if saved is None else saved.costs)
        self._steps: dict[int, tuple[float, StepWork]] = {}
        self._last_output_s = 0.0
        self._saved_s = clock()
        # What was asked of each tier and has not come.
        self._loading: dict[str, Mapping[TierKind, int]] = {}

    # ------------------------------------------------------------ learning

    def step_begun(self, number: int, prefills: Iterable[tuple[int, int]], num_decodes: int) -> None:
        """A step was scheduled; `prefills` as in `StepWork.of`."""
        if len(self._steps) >= _MAX_STEPS_UNDER_WAY:
            self._steps.clear()
        self._steps[number] = (self._clock(), StepWork.of(prefills, num_decodes))

    def step_ended(self, number: int) -> None:
        """The step has given its output. Steps that overlap are timed from the last one's output."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        begun_s, work = step
        now = self._clock()
        seconds = now - max(begun_s, self._last_output_s)
        self._last_output_s = now
        self.model.observe_step(work, seconds)

    def load_begun(self, request_id: str, blocks: Mapping[TierKind, int]) -> None:
        self._loading[request_id] = blocks

    def load_ended(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    def learn(self, news: News) -> None:
        for tier, num_bytes, seconds in news.loads:
            self.model.observe_load(TierKind(tier), num_bytes, seconds)
        for tier, seconds in news.silences:
            self.model.observe_silence(TierKind(tier), seconds)
        for number in news.steps:
            self.step_ended(number)

    # ------------------------------------------------------------ answering

    def prefill(self) -> PrefillCost:
        return self.model.prefill_cost()

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float | None:
        """Seconds to compute so many tokens; None while that is not known."""
        return self.prefill().predict(new_tokens, cached_tokens) if self.model.prefill_known else None

    def plan(self, question: Question, mode: str) -> Plan:
        """Return what to load: a plan that computes one end piece of the cached blocks, all of them, or none.

        vLLM takes what it gets as a prefix, so nothing is computed in front of what is loaded.
        """
        backlog = Backlog(self._queues_s(question.block_bytes))
        count = len(question.tiers)
        prefill = self.prefill()
        if mode != "auto":
            start = count if mode == "fetch" else 0
            return pinned(question, prefill, self.model, backlog, start, count)
        plan = choose(question, prefill, self.model, backlog)
        if not plan.measured:
            # To load is what lets loads be measured, and its deadline bounds what it may cost.
            return pinned(question, prefill, self.model, backlog, count, count)
        cut = plan.compared.prefix_cut
        return pinned(question, prefill, self.model, backlog, cut.start, cut.end)

    def are_known(self, tiers: Iterable[TierKind]) -> bool:
        """Whether loading from all of them was measured."""
        return all(self.model.load_known(tier) for tier in set(tiers))

    def predicted_load_s(self, tiers: Iterable[TierKind], block_bytes: int) -> float:
        counts: dict[TierKind, int] = {}
        for tier in tiers:
            counts[tier] = counts.get(tier, 0) + 1
        queues = self._queues_s(block_bytes)
        return max(
            (
                queues.get(tier, 0.0) + self.model.load_cost(tier).predict(count * block_bytes)
                for tier, count in counts.items()
            ),
            default=0.0,
        )

    def _queues_s(self, block_bytes: int) -> dict[TierKind, float]:
        queues: dict[TierKind, float] = {}
        for blocks in self._loading.values():
            for tier, count in blocks.items():
                queues[tier] = queues.get(tier, 0.0) + count * block_bytes * self.model.load_cost(tier).per_byte_s
        return queues

    # ------------------------------------------------------------ keeping

    def wants_saving(self) -> bool:
        return self._folder is not None and self._clock() - self._saved_s > _SAVE_EVERY_S

    def snapshot(self) -> SavedCosts:
        self._saved_s = self._clock()
        return self.model.worth_saving()

    def save(self, costs: SavedCosts) -> None:
        """Write what was measured; from any thread."""
        if self._folder is None or (costs.step is None and not costs.loads):
            return
        with contextlib.suppress(OSError):
            saved_profile.save(self._folder, self._profile.with_costs(costs, time.time(), "vllm"))


def blank_profile(model: str, device: str, chunk_tokens: int, block_tokens: int, block_bytes: int) -> SavedProfile:
    return SavedProfile(model, device, socket.gethostname(), chunk_tokens, block_tokens, block_bytes, 0.0)
