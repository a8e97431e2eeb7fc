"""What `kvstore bench plan` compares: links, prefixes, scenarios, and the plans of each case.

idle     all of the prefix in S3, nothing else runs
beside   the same beside two streams of the engine that decode all the time
split    the first half of the prefix in RAM, the rest in S3
cut      as idle, but the link breaks in the middle of the load
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Scenario = Literal["idle", "beside", "split", "cut"]
COMPARED: Final[tuple[Scenario, ...]] = ("idle", "beside", "split")
SCENARIOS: Final[tuple[Scenario, ...]] = (*COMPARED, "cut")
AUTO, LOAD, RECOMPUTE = "auto", "load", "recompute"


class LinkSetting(NamedTuple):
    """Of the link to S3; 10**6 bytes per MB."""

    round_trip_ms: float
    mb_per_s: float

    @property
    def name(self) -> str:
        return f"{self.round_trip_ms:g}ms-{self.mb_per_s:g}MBps"


LINKS: Final = tuple(LinkSetting(*one) for one in ((1, 300), (5, 60), (20, 30), (50, 12), (200, 5)))
# Where both loading and computing are worth something.
MIDDLE_LINKS: Final = LINKS[1:4]
PREFIXES: Final = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: `prefix_tokens` that are cached, and some new ones."""

    scenario: Scenario
    link: LinkSetting
    prefix_tokens: int

    @property
    def name(self) -> str:
        return f"{self.scenario}-{self.link.name}-{self.prefix_tokens}"

    @property
    def head_tokens(self) -> int:
        """How much of the prefix lies in RAM."""
        return self.prefix_tokens // 2 if self.scenario == "split" else 0


@dataclass(frozen=True, slots=True)
class PlanName:
    """`auto`, `load`, `recompute`, or a fixed cut: so many tokens are loaded, the rest is computed."""

    name: str
    cut_tokens: int = -1

    @classmethod
    def cut(cls, tokens: int) -> "PlanName":
        return cls(f"cut {tokens}", tokens)

    def __str__(self) -> str:
        return self.name


AUTO_PLAN, LOAD_PLAN, RECOMPUTE_PLAN = PlanName(AUTO), PlanName(LOAD), PlanName(RECOMPUTE)


def cases(links: tuple[LinkSetting, ...], prefixes: tuple[int, ...], scenarios: tuple[Scenario, ...]) -> Iterator[Case]:
    """Yield the cases that are compared, those of one link together."""
    for link in links:
        for scenario in scenarios:
            if scenario != "cut":
                yield from (Case(scenario, link, prefix) for prefix in prefixes)


class CutSearch:
    """Which fixed cuts to run: every second one first, then those beside the best.

    Between two cuts the time is close to linear in the cut but for where the tier changes, so the best lies beside the
    best of a coarser grid; running all of them would take longer than all the rest.
    """

    def __init__(self, prefix_tokens: int, stride: int, always: tuple[int, ...] = ()) -> None:
        """`always`: cuts that are on every grid, such as the border between two tiers."""
        self._end = prefix_tokens
        self._stride = stride
        self._step = stride
        while self._step * 2 < prefix_tokens:
            self._step *= 2
        self._known = {0, prefix_tokens}
        self._first = sorted({*range(self._step, prefix_tokens, self._step), *always} - self._known)

    def next(self, best_tokens: int) -> list[int]:
        """Return the cuts to run next, [] at the end; `best_tokens` is the best so far (0: recompute, all: load)."""
        while True:
            found, self._first = self._first, []
            if not found:
                self._step //= 2
                if self._step < self._stride:
                    return []
                found = [cut for cut in (best_tokens - self._step, best_tokens + self._step) if 0 < cut < self._end]
            found = [cut for cut in found if cut not in self._known]
            self._known.update(found)
            if found:
                return found
