"""How well the cost model learns a machine: errors on random ones, by what is measured and by what goes wrong.

python benchmarks/cost_model.py [--machines 20] [--noise 0.05]

Each machine has random costs and measurements with normal noise; `outliers` are five times too slow. `moved` compares
the predictions with those of a model that saw the same without outliers, `error after` with the truth, 50 measurements
after everything became slower or faster. The predictions are for work of the kind that was measured, in other sizes.
"""

import argparse
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.outcome import TierKind
from policies.cost import CostModel, StepWork

_CHUNK: Final = 256
_SLOW: Final = 5.0

Slices = tuple[list[tuple[int, int]], int]

# The i-th step of a mix: its prefill slices (n new after p cached tokens), and its decodes.
STEPS: Final[Mapping[str, Callable[[random.Random, int], Slices]]] = {
    "prefill only": lambda draw, i: ([(draw.choice([16, 64, 128, 200, 256, 256]), 256 * draw.randint(0, 16))], 0),
    "with decodes": lambda draw, i: (
        ([(draw.choice([16, 64, 200, 256]), 256 * draw.randint(0, 16))], draw.randint(0, 8))
        if i % 3
        else ([], draw.randint(1, 8))
    ),
    "mostly decodes": lambda draw, i: ([(256, 256 * draw.randint(0, 16))] if i % 4 == 0 else [], draw.randint(1, 8)),
    "one chunk size": lambda draw, i: ([(256, 256 * draw.randint(0, 16))], 0),
    "one step": lambda draw, i: ([(256, 1024)], 0),
    "tiny": lambda draw, i: ([(draw.randint(2, 40), draw.randint(0, 4000))], 0),
    "whole prompts": lambda draw, i: ([(256 if i % 9 < 8 else draw.randint(10, 250), 256 * (i % 9))], 0),
}
_ASKED_STEPS: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    "prefill only": [(1000, 0), (2000, 1000), (64, 3000)],
    "with decodes": [(1000, 0), (2000, 1000), (64, 3000)],
    "mostly decodes": [(1024, 0), (2048, 1024)],
    "one chunk size": [(1024, 0), (2048, 1024)],
    "one step": [(256, 1024)],
    "tiny": [(20, 0), (30, 3000)],
    "whole prompts": [(1024, 0), (2048, 0), (100, 2048)],
}
LOADS: Final[Mapping[str, Callable[[random.Random], int]]] = {
    "all sizes": lambda draw: int(10 ** draw.uniform(4.5, 8)),
    "tiny": lambda draw: int(10 ** draw.uniform(3.6, 5)),
    "one size": lambda draw: 2 << 20,
    "two sizes": lambda draw: draw.choice([1 << 20, 64 << 20]),
}
_ASKED_LOADS: Final[Mapping[str, Sequence[int]]] = {
    "all sizes": [1 << 17, 1 << 22, 50 << 20],
    "tiny": [8000, 60_000],
    "one size": [2 << 20],
    "two sizes": [1 << 20, 64 << 20],
}
# Whether the i-th measurement is an outlier: a fifth of them are.
OUTLIERS: Final[Mapping[str, Callable[[int], bool]]] = {
    "none": lambda i: False,
    "random": lambda i: random.Random(7919 * i).random() < 0.2,
    "every fifth": lambda i: i % 5 == 0,
    "bursts of 10": lambda i: i % 50 >= 40,
    "bursts of 20": lambda i: i % 100 >= 80,
}


@dataclass(frozen=True)
class StepRun:
    """One random engine, which computes steps of a mix."""

    mix: str
    seed: int
    noise: float = 0.05

    def moved(self, outliers: str, num_samples: int) -> float:
        """Return the largest relative difference that the outliers make."""
        with_them, without = self._model([(num_samples, 1.0)], outliers), self._model([(num_samples, 1.0)], "none")
        return max(abs(with_them.prefill(*q) / without.prefill(*q) - 1) for q in _ASKED_STEPS[self.mix])

    def error_after(self, speed: float, outliers: str, before: int, after: int) -> float:
        """Return the largest relative error, `after` steps after all became `speed` times slower."""
        model = self._model([(before, 1.0), (after, speed)], outliers)
        return max(abs(model.prefill(*q) / (speed * self._prefill_s(*q)) - 1) for q in _ASKED_STEPS[self.mix])

    def _model(self, phases: Sequence[tuple[int, float]], outliers: str) -> CostModel:
        draw, model, step = random.Random(self.seed + 1000), CostModel(_CHUNK, lambda: 0.0), 0
        for count, speed in phases:
            for _ in range(count):
                work = StepWork.of(*STEPS[self.mix](draw, step))
                factor = speed * math.exp(draw.gauss(0, self.noise)) * (_SLOW if OUTLIERS[outliers](step) else 1)
                model.observe_step(work, self._step_s(work) * factor)
                model.prefill_cost()
                step += 1
        return model

    def _step_s(self, work: StepWork) -> float:
        draw = random.Random(self.seed)
        token_s = 10 ** draw.uniform(-5, -2.3)
        step_s, pair_s = token_s * draw.choice([0, 1, 10, 50, 200, 600]), token_s * 10 ** draw.uniform(-5, -3.5)
        decode_s, alone_s = token_s * draw.choice([1, 5, 10]), step_s * draw.choice([0.3, 0.6, 1])
        front_s = step_s if work.prefill_tokens else alone_s
        return front_s + token_s * work.prefill_tokens + pair_s * work.prefill_work + decode_s * work.num_decodes

    def _prefill_s(self, new: int, cached: int) -> float:
        chunks = [(min(_CHUNK, new - at), cached + at) for at in range(0, new, _CHUNK)]
        return sum(self._step_s(StepWork.of([chunk], 0)) for chunk in chunks)


@dataclass(frozen=True)
class LoadRun:
    """One random link, which brings loads of a mix of sizes."""

    mix: str
    seed: int
    noise: float = 0.05

    def moved(self, outliers: str, num_samples: int) -> float:
        """As in StepRun."""
        with_them = self._model([(num_samples, (1.0, 1.0))], outliers)
        without = self._model([(num_samples, (1.0, 1.0))], "none")
        asked = [{TierKind.S3: num_bytes} for num_bytes in _ASKED_LOADS[self.mix]]
        return max(abs(with_them.load(q) / without.load(q) - 1) for q in asked)

    def error_after(self, change: tuple[float, float], outliers: str, before: int, after: int) -> float:
        """As in StepRun; `change` is by how much latency and seconds per byte grew."""
        model = self._model([(before, (1.0, 1.0)), (after, change)], outliers)
        return max(
            abs(model.load({TierKind.S3: num_bytes}) / self._load_s(num_bytes, change) - 1)
            for num_bytes in _ASKED_LOADS[self.mix]
        )

    def _model(self, phases: Sequence[tuple[int, tuple[float, float]]], outliers: str) -> CostModel:
        draw, load, now = random.Random(self.seed + 1000), 0, [0.0]
        model = CostModel(_CHUNK, lambda: now[0])
        for count, change in phases:
            for _ in range(count):
                num_bytes = LOADS[self.mix](draw)
                factor = math.exp(draw.gauss(0, self.noise)) * (_SLOW if OUTLIERS[outliers](load) else 1)
                now[0] += 0.1
                model.observe_load(TierKind.S3, num_bytes, self._load_s(num_bytes, change) * factor)
                model.load_cost(TierKind.S3)
                load += 1
        return model

    def _load_s(self, num_bytes: int, change: tuple[float, float]) -> float:
        draw = random.Random(self.seed)
        latency_s, per_byte_s = 10 ** draw.uniform(-4, -0.7), 10 ** draw.uniform(-10.5, -6.7)
        return change[0] * latency_s + change[1] * per_byte_s * num_bytes


def _show(title: str, values: list[float]) -> None:
    values.sort()
    percent = [100 * values[min(len(values) - 1, int(len(values) * q))] for q in (0.5, 0.95, 1.0)]
    print(f"{title:<58} {percent[0]:5.1f} {percent[1]:5.1f} {percent[2]:5.1f}")


def _speed() -> None:
    draw, model, times_s = random.Random(1), CostModel(_CHUNK, lambda: 0.0), []
    for step in range(2000):
        work = StepWork.of(*STEPS["with decodes"](draw, step))
        began = time.perf_counter()
        model.observe_step(work, draw.uniform(0.95, 1.05))
        model.prefill(1000, 500)
        times_s.append(time.perf_counter() - began)
    print(f"observe and predict: {1e6 * sum(times_s) / len(times_s):.0f} us on average")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.05)
    options = parser.parse_args()
    seeds = range(options.machines)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {options.machines} machines, noise {options.noise:.0%}")
    _speed()
    print(f"{'':<58}  p50%  p95%  max%")
    for mix in STEPS:
        steps = [StepRun(mix, seed, options.noise) for seed in seeds]
        for outliers in list(OUTLIERS)[1:]:
            _show(f"steps, {mix}: moved by outliers, {outliers}", [run.moved(outliers, 100) for run in steps])
        for outliers in ("none", "random"):
            for speed in (1.5, 1 / 1.5, 3.0):
                title = f"steps, {mix}: error after x{speed:.2f}, outliers {outliers}"
                _show(title, [run.error_after(speed, outliers, 100, 50) for run in steps])
    for mix in LOADS:
        loads = [LoadRun(mix, seed, options.noise) for seed in seeds]
        for outliers in list(OUTLIERS)[1:]:
            _show(f"loads, {mix}: moved by outliers, {outliers}", [run.moved(outliers, 100) for run in loads])
        for outliers in ("none", "random"):
            for change in ((1.5, 1.5), (1 / 1.5, 1 / 1.5), (1.0, 1.5), (1.5, 1.0)):
                title = f"loads, {mix}: error after x{change[0]:.2f}, x{change[1]:.2f}, outliers {outliers}"
                _show(title, [run.error_after(change, outliers, 80, 50) for run in loads])
    return 0


if __name__ == "__main__":
    sys.exit(main())
