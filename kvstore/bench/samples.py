"""Timings of the same work done in turns by several contenders, and the ratio of their medians.

Machines are noisy, so a figure alone says little: ours and its ceiling are measured in one run, one after the other
in every round, and only the ratio of the medians is compared with anything.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds that each round took for `num_bytes` bytes (0: no bytes are moved)."""

    seconds: tuple[float, ...]
    num_bytes: int = 0

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """At the median; 10**9 bytes."""
        return self.num_bytes / self.median_s / 1e9

    def percentile_s(self, share: float) -> float:
        """Return the nearest-rank percentile, `share` in (0, 1]."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def as_json(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "runs": len(self.seconds),
            "median_s": self.median_s,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "iqr_s": [self.percentile_s(0.25), self.percentile_s(0.75)],
        }
        if self.num_bytes:
            figures |= {"bytes": self.num_bytes, "gb_per_s": self.gb_per_s}
        return figures


@dataclass(frozen=True, slots=True)
class Compared:
    """Ours beside one or more ways to do the same work without us; the fastest of them is the ceiling."""

    ours: Timing
    ceilings: Mapping[str, Timing]

    @property
    def ceiling(self) -> str:
        return min(self.ceilings, key=lambda name: self.ceilings[name].median_s)

    @property
    def ratio(self) -> float:
        """How fast we are as a share of the ceiling: 1 is as fast, below 1 slower."""
        return self.ceilings[self.ceiling].median_s / self.ours.median_s

    def as_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "ratios": {name: one.median_s / self.ours.median_s for name, one in self.ceilings.items()},
            "ceiling": self.ceiling,
            "ours": self.ours.as_json(),
            "ceilings": {name: timing.as_json() for name, timing in self.ceilings.items()},
        }


Contender = Callable[[int], Mapping[str, float]]
"""Does the work of one round (its number is given) and returns the seconds of each part that it timed."""


def in_turns(contenders: Sequence[Contender], rounds: int, on_round: Callable[[], None]) -> dict[str, list[float]]:
    """Run every contender once per round and return the seconds of each timed part, `rounds` of them.

    One more round comes first and is not counted: first touches, caches and connections belong to nobody's figure.
    The order turns from round to round, so that no contender always follows the same one.
    """
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            timed = contender(number)
            if number:
                for part, part_s in timed.items():
                    seconds.setdefault(part, []).append(part_s)
        on_round()
    return seconds


def worst(compared: Mapping[str, Compared]) -> float:
    """Return the smallest ratio."""
    return min(one.ratio for one in compared.values())


def shuffled(count: int, seed: int) -> list[int]:
    """Return 0 to count - 1 in an order that only depends on `seed`: everybody's "random order"."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
