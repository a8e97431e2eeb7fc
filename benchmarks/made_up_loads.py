"""Loads of requests that are made up, of kinds that are served every day, to try eviction policies on.

A kind is a function of a random generator. None was fitted to a published trace; what they have in common with real
loads are the things that decide what is worth keeping: prompts that share a beginning, sessions that go on after a
pause, and much that never comes again. Pure: the same seed, the same load.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from policies.trace import Trace, TraceRequest

Random = np.random.Generator
_HOUR_S: Final = 3600.0


class _Load:
    """Gathers the requests of one load. Every block has a number of its own, and so is one prefix."""

    def __init__(self, random: Random, block_tokens: int, span_s: float) -> None:
        self._random = random
        self._block_tokens = block_tokens
        self._span_s = span_s
        self._num_blocks = 0
        self._fills: dict[int, int] = {}
        self._requests: list[TraceRequest] = []

    def new(self, count: float) -> list[int]:
        """Return the numbers of so many new blocks, at least one."""
        begin = self._num_blocks
        self._num_blocks += max(1, int(count))
        return list(range(begin, self._num_blocks))

    def about(self, median: float, spread: float) -> list[int]:
        """Return new blocks, log-normally many."""
        return self.new(median * self._random.lognormal(0.0, spread))

    def longer(self, prompt: Sequence[int], more: Sequence[int]) -> list[int]:
        """Return the prompt that goes on from this one: its last block was partial, and has another number once it is
        filled up."""
        return [*prompt[:-1], *self.new(1), *more]

    def ask(self, at_s: float, blocks: Sequence[int]) -> None:
        """A request; one after the end is left out. Its last block is filled at random, and not to its end."""
        if at_s <= self._span_s:
            fill = self._fills.setdefault(blocks[-1], int(self._random.integers(1, self._block_tokens)))
            tokens = (len(blocks) - 1) * self._block_tokens + fill
            self._requests.append(TraceRequest(at_s, tokens, int(self._random.integers(20, 800)), tuple(blocks)))

    def starts(self, count: int) -> list[float]:
        """Return when so many sessions begin."""
        return sorted(self._random.uniform(0.0, self._span_s, count).tolist())

    def popular(self, count: int, steepness: float) -> Callable[[], int]:
        """Return what draws one of so many by a Zipf popularity."""
        weights = np.arange(1, count + 1) ** -steepness
        edges = np.cumsum(weights / weights.sum())
        return lambda: min(count - 1, int(np.searchsorted(edges, self._random.random())))

    def trace(self) -> Trace:
        return Trace(sorted(self._requests, key=lambda request: request.arrival_s), self._block_tokens)


def chats(random: Random, sessions: int = 3_500, system_prompts: int = 12) -> Trace:
    """People who chat, most with a system prompt that others have too."""
    load = _Load(random, 512, 2 * _HOUR_S)
    prompts = [load.about(1.0, 0.8) for _ in range(system_prompts)]
    popular = load.popular(system_prompts, 1.2)
    for at_s in load.starts(sessions):
        blocks = prompts[popular()] if random.random() < 0.7 else []
        blocks = blocks + load.about(3.0, 1.2)
        think_s = 55.0 * random.lognormal(0.0, 0.8)
        for _ in range(int(random.geometric(0.35))):
            load.ask(at_s, blocks)
            blocks = load.longer(blocks, load.about(1.0, 0.8))
            at_s += 5.0 + think_s * random.lognormal(0.0, 0.7)
    return load.trace()


def chats_with_documents(random: Random, sessions: int = 1_000) -> Trace:
    """Long documents that are asked about, nearly half of them once."""
    load = _Load(random, 512, 2 * _HOUR_S)
    for at_s in load.starts(sessions):
        blocks = load.about(16.0, 1.0)
        turns = 1 if random.random() < 0.45 else 1 + int(random.geometric(0.3))
        think_s = 75.0 * random.lognormal(0.0, 1.0)
        for _ in range(turns):
            load.ask(at_s, blocks)
            blocks = load.longer(blocks, load.new(random.integers(1, 4)))
            at_s += 3.0 + think_s * random.lognormal(0.0, 0.8)
    return load.trace()


def chats_that_hardly_return(random: Random, sessions: int = 5_000) -> Trace:
    """Single questions, and one in ten asks a second one."""
    load = _Load(random, 512, 2 * _HOUR_S)
    greeting = load.new(2)
    for at_s in load.starts(sessions):
        blocks = (greeting if random.random() < 0.5 else []) + load.about(8.0, 1.0)
        load.ask(at_s, blocks)
        while random.random() < 0.1:
            blocks = load.longer(blocks, load.about(2.0, 0.7))
            at_s += 90.0 * random.lognormal(0.0, 1.0)
            load.ask(at_s, blocks)
    return load.trace()


def people_who_come_back(random: Random, people: int = 260) -> Trace:
    """A day of people with several chats each, who go back to old ones."""
    load = _Load(random, 512, 24 * _HOUR_S)
    for at_s in load.starts(people):
        own: list[list[int]] = []
        for _ in range(int(random.geometric(0.12))):
            if not own or random.random() < 0.35:
                own.append(load.about(4.0, 1.0))
            # What was begun last is likeliest.
            which = max(0, len(own) - int(random.geometric(0.5)))
            for _ in range(int(random.geometric(0.4))):
                load.ask(at_s, own[which])
                own[which] = load.longer(own[which], load.about(1.5, 0.7))
                at_s += 60.0 * random.lognormal(0.0, 1.0)
            at_s += 0.7 * _HOUR_S * random.lognormal(0.0, 1.2)
    return load.trace()


def chats_in_small_blocks(random: Random, sessions: int = 1_500, system_prompts: int = 20) -> Trace:
    """Chats whose blocks have 16 tokens, as in vLLM."""
    load = _Load(random, 16, 2 * _HOUR_S)
    prompts = [load.about(20.0, 0.8) for _ in range(system_prompts)]
    popular = load.popular(system_prompts, 1.2)
    for at_s in load.starts(sessions):
        blocks = prompts[popular()] if random.random() < 0.7 else []
        blocks = blocks + load.about(20.0, 1.3)
        think_s = 55.0 * random.lognormal(0.0, 0.8)
        for _ in range(int(random.geometric(0.35))):
            load.ask(at_s, blocks)
            blocks = load.longer(blocks, load.about(25.0, 0.8))
            at_s += 5.0 + think_s * random.lognormal(0.0, 0.7)
    return load.trace()


def tools(random: Random, calls: int = 5_400, prompts: int = 30) -> Trace:
    """Agents behind long, popular tool prompts, most of one step."""
    load = _Load(random, 512, _HOUR_S)
    shared = [load.about(9.0, 0.7) for _ in range(prompts)]
    popular = load.popular(prompts, 1.3)
    for at_s in load.starts(calls):
        blocks = shared[popular()] + load.about(5.5, 0.9)
        for _ in range(1 if random.random() < 0.6 else 1 + int(random.geometric(0.45))):
            load.ask(at_s, blocks)
            blocks = load.longer(blocks, load.new(random.integers(1, 4)))
            at_s += 2.0 + random.exponential(25.0)
    return load.trace()


def tools_with_hundreds_of_prompts(random: Random) -> Trace:
    return tools(random, 6_000, 400)


def coding_agents(random: Random, tasks: int = 120, repositories: int = 12) -> Trace:
    """Ten to eighty steps a task, some seconds apart and now and then after minutes; contexts are compacted."""
    load = _Load(random, 512, 3 * _HOUR_S)
    system = load.new(random.integers(4, 20))
    known = [load.new(random.integers(2, 12)) for _ in range(repositories)]
    for at_s in load.starts(tasks):
        blocks = system + known[int(random.integers(repositories))] + load.new(random.integers(1, 4))
        step_s = 8.0 * random.lognormal(0.0, 0.6)
        for _ in range(2 + int(24 * random.lognormal(0.0, 0.7))):
            load.ask(at_s, blocks)
            blocks = load.longer(blocks, load.new(random.poisson(1.2) + (8 if random.random() < 0.05 else 0)))
            if len(blocks) > 200 or random.random() < 0.01:
                blocks = system + load.new(random.integers(2, 10))
            at_s += step_s * random.lognormal(0.0, 0.8)
            if random.random() < 0.05:
                at_s += random.exponential(400.0)
    return load.trace()


def agents_that_fork(random: Random, tasks: int = 150) -> Trace:
    """Several attempts at each task, which go on from what was found out together."""
    load = _Load(random, 512, 2 * _HOUR_S)
    system = load.new(6)
    for at_s in load.starts(tasks):
        found = system + load.about(8.0, 0.6)
        for _ in range(int(random.integers(1, 6))):
            load.ask(at_s, found)
            found = load.longer(found, load.new(random.integers(1, 3)))
            at_s += 10.0 * random.lognormal(0.0, 0.6)
        for _ in range(int(random.integers(1, 6))):
            blocks, then_s = found, at_s + random.exponential(5.0)
            for _ in range(int(random.geometric(0.15))):
                load.ask(then_s, blocks)
                blocks = load.longer(blocks, load.new(random.integers(1, 3)))
                then_s += 12.0 * random.lognormal(0.0, 0.7)
    return load.trace()


def research(random: Random, questions: int = 260) -> Trace:
    """A lead that waits for the sub-agents it sends out, each of which reads pages that nobody reads again."""
    load = _Load(random, 512, 3 * _HOUR_S)
    lead_prompt, helper_prompt = load.new(5), load.new(8)
    for at_s in load.starts(questions):
        blocks = lead_prompt + load.about(2.0, 0.6)
        for _ in range(int(random.integers(2, 6))):
            load.ask(at_s, blocks)
            ends_s = [at_s]
            for _ in range(int(random.integers(1, 5))):
                own, then_s = helper_prompt + load.new(1), at_s + 3.0
                for _ in range(int(random.geometric(0.2))):
                    load.ask(then_s, own)
                    own = load.longer(own, load.about(4.0, 0.8))
                    then_s += 9.0 * random.lognormal(0.0, 0.6)
                ends_s.append(then_s)
            blocks = load.longer(blocks, load.new(random.integers(2, 8)))
            at_s = max(ends_s) + 5.0
    return load.trace()


def chats_beside_agents(random: Random) -> Trace:
    """One engine that serves both, in its last hour agents alone."""
    return _together(chats(random, 1_500), coding_agents(random, 60))


def templates(random: Random, requests: int = 8_000, users: int = 300, steepness: float = 1.0) -> Trace:
    """Users of an API with a few long templates each, an own question behind them, in blocks of 16 tokens; users come
    and go."""
    load = _Load(random, 16, 2 * _HOUR_S)
    own: list[list[list[int]]] = []
    for _ in range(users):
        base = load.about(25.0, 0.9)
        own.append([base + load.about(12.0, 1.0) for _ in range(int(random.integers(1, 5)))])
    begins_s = random.uniform(-1 * _HOUR_S, 1.6 * _HOUR_S, users)
    ends_s = begins_s + random.exponential(2 * _HOUR_S, users)
    weights = np.arange(1, users + 1) ** -steepness
    for at_s in load.starts(requests):
        weight = weights * ((begins_s <= at_s) & (at_s < ends_s))
        if not weight.any():
            continue
        user = int(random.choice(users, p=weight / weight.sum()))
        which = min(len(own[user]), int(random.geometric(0.6))) - 1
        blocks = own[user][which] + load.about(13.0, 1.0)
        load.ask(at_s, blocks)
        if random.random() < 0.08:
            load.ask(at_s + random.exponential(20.0), blocks)
    return load.trace()


def templates_of_like_popularity(random: Random) -> Trace:
    return templates(random, users=400, steepness=0.7)


def templates_of_a_few(random: Random) -> Trace:
    return templates(random, users=200, steepness=1.3)


def in_whole_blocks(trace: Trace) -> Trace:
    """Return the load as engines store it: without the last block of each prompt, which is not full."""
    requests = [
        TraceRequest(
            request.arrival_s,
            (len(request.hash_ids) - 1) * trace.block_tokens,
            request.output_tokens,
            request.hash_ids[:-1],
        )
        for request in trace.requests
        if len(request.hash_ids) > 1
    ]
    return Trace(requests, trace.block_tokens)


def _together(some: Trace, others: Trace) -> Trace:
    """Both loads at once; the numbers of the second one's blocks come after all of the first one's."""
    assert some.block_tokens == others.block_tokens
    shift = 1 + max(max(request.hash_ids) for request in some.requests)
    shifted = [
        TraceRequest(
            request.arrival_s,
            request.prompt_tokens,
            request.output_tokens,
            tuple(number + shift for number in request.hash_ids),
        )
        for request in others.requests
    ]
    both = sorted([*some.requests, *shifted], key=lambda request: request.arrival_s)
    assert all(one.arrival_s <= later.arrival_s for one, later in pairwise(both))
    return Trace(both, some.block_tokens)


CHATS_AND_AGENTS: Final[dict[str, Callable[[Random], Trace]]] = {
    make.__name__.replace("_", " "): make
    for make in (
        chats,
        chats_with_documents,
        chats_that_hardly_return,
        people_who_come_back,
        chats_in_small_blocks,
        tools,
        tools_with_hundreds_of_prompts,
        coding_agents,
        agents_that_fork,
        research,
        chats_beside_agents,
    )
}
TEMPLATES: Final[dict[str, Callable[[Random], Trace]]] = {
    make.__name__.replace("_", " "): make for make in (templates, templates_of_like_popularity, templates_of_a_few)
}
