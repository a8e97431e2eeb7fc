"""The net under the session-aware policy: on no load much worse than the best of the older ones."""

import bisect
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from policies.eviction.best import Best
from policies.eviction.choice import make
from policies.eviction.gittins import Gittins
from policies.replay import Accesses, MakePolicy, accesses_of, replay
from policies.trace import Trace, TraceRequest
from tests.support.trees import Tree

Requests = list[tuple[float, Sequence[int]]]

NUM_REQUESTS = 4_000


class Load:
    """Hands out blocks that nobody had before."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.requests: Requests = []
        self._next = 0

    def new(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def popular(self, count: int, power: float) -> Callable[[], int]:
        """Return what draws numbers below `count` by Zipf's law."""
        weights = list(itertools.accumulate(1 / (rank + 1) ** power for rank in range(count)))
        return lambda: bisect.bisect_left(weights, self.choice.random() * weights[-1])

    def accesses(self) -> Accesses:
        self.requests.sort(key=lambda request: request[0])
        return accesses_of(
            Trace([TraceRequest(at_s, 10 * len(ids), 1, tuple(ids)) for at_s, ids in self.requests[:NUM_REQUESTS]], 10)
        )


def independent_prompts(load: Load) -> None:
    """Each asked for by itself, some much more often."""
    prompts = [load.new(load.choice.randint(2, 12)) for _ in range(1_000)]
    popular = load.popular(len(prompts), 1.1)
    for number in range(NUM_REQUESTS):
        load.requests.append((number / 4, prompts[popular()] + load.new(1)))


def templates(load: Load) -> None:
    """Examples that many share, and a question that comes once."""
    examples = [load.new(load.choice.randint(3, 16)) for _ in range(300)]
    popular = load.popular(len(examples), 1.0)
    for number in range(NUM_REQUESTS):
        load.requests.append((number / 4, examples[popular()] + load.new(load.choice.choice((1, 1, 2, 3)))))


def chats(load: Load) -> None:
    """A minute or so between turns, four turns or so."""
    for _ in range(1_200):
        at_s, prompt = load.choice.uniform(0, 3_000), load.new(load.choice.randint(1, 8))
        while True:
            load.requests.append((at_s, prompt + load.new(1)))
            if load.choice.random() < 0.25:
                break
            at_s += load.choice.lognormvariate(4.0, 0.9)
            prompt = prompt + load.new(load.choice.randint(1, 4))


def agents(load: Load) -> None:
    """One long prompt of the system for all; a tool's answer every few seconds."""
    system = load.new(20)
    for _ in range(300):
        at_s, prompt = load.choice.uniform(0, 1_500), system + load.new(load.choice.randint(1, 6))
        for _ in range(load.choice.randint(4, 25)):
            load.requests.append((at_s, prompt + load.new(1)))
            at_s += load.choice.lognormvariate(1.2, 0.9)
            prompt = prompt + load.new(load.choice.randint(0, 3))


def once(load: Load) -> None:
    """Hardly anybody returns."""
    for number in range(NUM_REQUESTS):
        prompt = load.new(load.choice.randint(1, 12))
        load.requests.append((number / 2, prompt + load.new(1)))
        if load.choice.random() < 0.04:
            load.requests.append((number / 2 + load.choice.lognormvariate(4.0, 1.0), prompt + load.new(2)))


# By how many points it may be behind. Of popular prompts a part is lost until another policy is followed.
LOADS = [(independent_prompts, 1.0), (templates, 1.0), (chats, 0.3), (agents, 0.3), (once, 0.3)]


def hits(accesses: Accesses, share: float, make_policy: MakePolicy) -> float:
    return 100 * replay(accesses, int(share * accesses.num_blocks), make_policy).token_hit_ratio


def named(name: str) -> MakePolicy:
    return lambda tier, _: make(name, tier, tier.clock)


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "behind"), LOADS)
@pytest.mark.parametrize("share", [0.03, 0.1])
def test_it_is_nowhere_far_behind_the_best_of_the_older_ones(
    fill: Callable[[Load], None], behind: float, share: float
) -> None:
    load = Load(1)
    fill(load)
    accesses = load.accesses()
    best = max(hits(accesses, share, named(name)) for name in ("lru", "s3fifo", "arc"))
    assert hits(accesses, share, named("gittins")) >= best - behind


def test_where_an_older_one_hits_more_it_is_followed() -> None:
    load = Load(2)
    independent_prompts(load)
    accesses = load.accesses()
    alone = hits(accesses, 0.03, lambda tier, _: Gittins(tier, tier.clock))
    assert hits(accesses, 0.03, named("s3fifo")) > alone + 1.5
    assert hits(accesses, 0.03, named("gittins")) > alone + 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_rival_that_is_followed_knows_all_that_is_there(number: int) -> None:
    tree = Tree(lambda view: Best(view, view.clock))
    for first in range(0, 60, 6):
        tree.insert(range(first, first + 6))
        tree.now_s += 1.0
    tree.policy.on_access(range(6, 12))
    assert isinstance(tree.policy, Best)
    tree.policy._judge.best = number
    tree.insert([100, 101])
    rival = tree.policy._rival
    assert rival is not None and len(rival) == len(tree.held)
    # What was used longest ago, its tail first; what was used again is still there at the end.
    assert tree.evict(3) == [5, 4, 3]
    tree.evict(len(tree.held) - 8)
    assert set(range(6, 9)) <= tree.held
    tree.policy._judge.best = 0
    tree.insert([200])
    assert tree.policy._rival is None
    tree.evict(len(tree.held))
    assert not tree.held and len(tree.policy) == 0


def test_victims_of_a_rival_that_finds_none_are_looked_for_once_more() -> None:
    tree = Tree(lambda view: Best(view, view.clock))
    tree.insert([1, 2, 3])
    assert isinstance(tree.policy, Best)

    class Blind:
        def victims(self, bytes_needed: int) -> list[int]:
            return []

    tree.policy._rival = Blind()  # type: ignore[assignment]
    assert tree.policy.victims(100) == [3]


def test_equal_loads_have_equal_hits() -> None:
    load = Load(3)
    independent_prompts(load)
    accesses = load.accesses()
    first, second = (hits(accesses, 0.03, named("gittins")) for _ in range(2))
    assert first == second
    assert not np.isnan(first)
