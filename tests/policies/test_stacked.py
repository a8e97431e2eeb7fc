"""RAM and SSD together, by hand, and the figures on a trace that Mooncake published."""

from policies import admission
from policies.eviction.choice import make
from policies.replay import Accesses, accesses_of
from policies.stacked import Stacked, TraceClock, replay_stacked
from policies.trace import Trace, TraceRequest
from tests.support.traces import published_trace


def trace(*requests: list[int]) -> Accesses:
    """Prompts of blocks of 10 tokens, one a second."""
    return accesses_of(
        Trace([TraceRequest(float(i), 10 * len(ids), 1, tuple(ids)) for i, ids in enumerate(requests)], 10)
    )


def run(accesses: Accesses, ram: int, ssd: int, name: str, policy: str = "lru", ssd_policy: str = "lru") -> Stacked:
    clock = TraceClock()
    return replay_stacked(
        accesses,
        ram,
        ssd,
        lambda tier, _: make(policy, tier, tier.clock),
        lambda tier, _: make(ssd_policy, tier, tier.clock),
        admission.make(name, clock),
        clock,
    )


AGAIN = trace([1, 2], [3, 4], [1, 2], [5, 6], [1, 2])


def test_what_fell_out_of_ram_comes_from_the_ssd_and_is_written_there_once() -> None:
    stacked = run(AGAIN, 2, 100, "always")
    assert (stacked.hit_tokens, stacked.ram_hit_tokens) == (40, 0)
    assert (stacked.ssd_writes, stacked.ssd_refused) == (6, 0)
    assert stacked.ram_writes == 10


def test_a_second_touch_costs_the_first_hit_and_saves_what_never_returns() -> None:
    stacked = run(AGAIN, 2, 100, "second_touch")
    assert stacked.hit_tokens == 20
    assert stacked.ssd_writes == 2


def test_without_an_ssd_it_is_ram_alone_and_without_ram_the_ssd_alone() -> None:
    assert run(AGAIN, 100, 0, "always").ram_hit_tokens == run(AGAIN, 100, 0, "always").hit_tokens == 40
    alone = run(AGAIN, 0, 100, "always")
    assert (alone.hit_tokens, alone.ram_hit_tokens) == (40, 0)


def test_each_tier_has_its_own_order() -> None:
    asked = trace([1], [2], [1], [3], [1])
    assert run(asked, 1, 2, "always", "fifo", "lru").hit_tokens == 20
    # What came first goes first, though it was used again.
    assert run(asked, 1, 2, "always", "lru", "fifo").hit_tokens == 10


def test_learned_admission_nearly_halves_the_writes_and_hits_more_with_the_daemons_policies() -> None:
    """What is not written makes room. It hits about as much as gittins on the SSD does that is given everything."""
    accesses = accesses_of(published_trace("synthetic_trace.jsonl"))
    always = run(accesses, 1_000, 8_000, "always", "gittins")
    learned = run(accesses, 1_000, 8_000, "learned", "gittins")
    assert 1.6 < always.ssd_writes / accesses.num_blocks < 1.8
    assert learned.ssd_writes <= accesses.num_blocks
    assert learned.token_hit_ratio >= always.token_hit_ratio
    assert learned.token_hit_ratio >= run(accesses, 1_000, 8_000, "always", "gittins", "gittins").token_hit_ratio - 0.01


def test_learned_admission_before_gittins_loses_little() -> None:
    """Which run of blocks happens to be refused moves this by half a point."""
    accesses = accesses_of(published_trace("synthetic_trace.jsonl"))
    always = run(accesses, 1_000, 8_000, "always", "gittins", "gittins")
    learned = run(accesses, 1_000, 8_000, "learned", "gittins", "gittins")
    assert learned.ssd_writes <= accesses.num_blocks
    assert learned.token_hit_ratio >= always.token_hit_ratio - 0.02
