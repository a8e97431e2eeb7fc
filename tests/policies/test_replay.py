"""Replays of traces small enough to work out by hand, and the published figures on the traces in shared/."""

from pathlib import Path

import pytest

from policies.eviction.belady import Belady
from policies.eviction.choice import NAMES, make
from policies.replay import Accesses, MakePolicy, accesses_of, infinite_hit_ratio, replay
from policies.trace import Trace, TraceRequest, read_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def trace(*requests: tuple[list[int], int]) -> Accesses:
    """`requests` are blocks of 10 tokens, and the prompt's tokens; one a second."""
    return accesses_of(Trace([TraceRequest(float(i), n, 1, tuple(ids)) for i, (ids, n) in enumerate(requests)], 10))


def maker(name: str) -> MakePolicy:
    return Belady if name == "belady" else lambda tier, _: make(name, tier, tier.clock)


# The second request shares 20 tokens with the first, the third is the first again: its last block holds 5 tokens.
THREE = trace(([1, 2, 3], 25), ([1, 2, 4], 30), ([1, 2, 3], 25))


@pytest.mark.parametrize(
    ("policy", "capacity", "hit_tokens"),
    [
        ("lru", 4, 20 + 25),
        ("lru", 3, 20 + 20),  # the second evicts block 3
        ("lru", 2, 20 + 20),  # block 3 never fits in
        ("lru", 1, 10 + 10),
        ("lru", 0, 0),
        ("belady", 3, 20 + 25),  # it knows that nobody needs block 4 again
    ],
)
def test_what_hits_is_what_was_worked_out_by_hand(policy: str, capacity: int, hit_tokens: int) -> None:
    replayed = replay(THREE, capacity, maker(policy))
    assert replayed.hit_tokens == hit_tokens
    assert replayed.input_tokens == 80
    assert replayed.token_hit_ratio == hit_tokens / 80


def test_a_replay_counts_requests_accesses_and_moves() -> None:
    replayed = replay(THREE, 3, maker("lru"))
    assert (replayed.num_requests, replayed.num_accesses, replayed.hit_blocks) == (3, 9, 4)
    assert (replayed.inserted_blocks, replayed.evicted_blocks) == (5, 2)


def test_an_infinite_tier_hits_all_that_was_there_before() -> None:
    assert THREE.num_blocks == 4
    assert infinite_hit_ratio(THREE) == 45 / 80


def test_a_block_behind_a_miss_does_not_hit() -> None:
    """Equal numbers behind different prefixes are different blocks, and so are they where the first one is missing."""
    accesses = trace(([1, 2], 20), ([3, 2], 20), ([1, 2], 20))
    assert accesses.num_blocks == 4
    assert replay(accesses, 4, maker("lru")).hit_tokens == 20


def test_lru_keeps_the_head_of_a_cold_prefix_longest() -> None:
    accesses = trace(([1, 2, 3], 30), ([7], 10), ([1, 2, 3], 30))
    assert replay(accesses, 3, maker("lru")).hit_tokens == 20


def test_fifo_forgets_what_is_used_often_and_lru_does_not() -> None:
    accesses = trace(([1], 10), ([2], 10), ([1], 10), ([3], 10), ([1], 10))
    assert replay(accesses, 2, maker("lru")).hit_tokens == 20
    assert replay(accesses, 2, maker("fifo")).hit_tokens == 10


def test_lfu_keeps_what_was_used_most() -> None:
    accesses = trace(([1], 10), ([1], 10), ([2], 10), ([3], 10), ([4], 10), ([1], 10))
    assert replay(accesses, 2, maker("lfu")).hit_tokens == 20
    assert replay(accesses, 2, maker("lru")).hit_tokens == 10


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_a_scan_does_not_wash_out_what_is_used_again(name: str) -> None:
    """Block 1 is used twice, then come ten others that nobody needs again."""
    scan = [([number], 10) for number in range(10, 20)]
    accesses = trace(([1], 10), ([1], 10), *scan, ([1], 10))
    assert replay(accesses, 4, maker(name)).hit_tokens == 20
    assert replay(accesses, 4, maker("lru")).hit_tokens == 10


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_what_comes_back_soon_after_it_left_stays_longer(name: str) -> None:
    """Block 1 leaves unused, is remembered, comes back, and then outlasts others that are new."""
    first = [([number], 10) for number in (1, 2, 3, 4, 5)]
    later = [([number], 10) for number in (6, 7, 8, 9)]
    accesses = trace(*first, ([1], 10), *later, ([1], 10))
    assert replay(accesses, 4, maker(name)).hit_tokens == 10
    assert replay(accesses, 4, maker("lru")).hit_tokens == 0


@pytest.mark.parametrize("capacity", [3, 10, 40])
def test_nothing_beats_belady_and_every_policy_gives_the_same_twice(capacity: int) -> None:
    accesses = chats(40)
    best = replay(accesses, capacity, maker("belady"))
    for name in NAMES:
        replayed = replay(accesses, capacity, maker(name))
        assert replayed.hit_blocks <= best.hit_blocks
        assert replayed == replay(accesses, capacity, maker(name))


def chats(rounds: int) -> Accesses:
    """Chats with a common head that grow by two blocks each turn; number c has a turn every c + 2 rounds."""
    requests = []
    for now in range(rounds):
        for chat in range(5):
            turn, rest = divmod(now, chat + 2)
            if rest == 0:
                prompt = [0, *(1000 * (chat + 1) + i for i in range(2 * turn + 2))]
                requests.append((prompt, 10 * len(prompt) - 3))
    return trace(*requests)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here (../shared/traces)")
@pytest.mark.parametrize(
    ("name", "policy", "percents"),
    [
        ("conversation", "lru", (5.3, 12.8, 28.4, 36.5)),
        ("conversation", "belady", (25.1, 35.5, 37.4, 37.4)),
        ("synthetic", "lru", (3.9, 10.9, 26.7, 49.7)),
        ("synthetic", "belady", (18.9, 32.0, 51.6, 65.1)),
    ],
)
def test_published_traces_give_the_known_hit_ratios(name: str, policy: str, percents: tuple[float, ...]) -> None:
    accesses = accesses_of(read_trace(SHARED / f"{name}_trace.jsonl"))
    for share, percent in zip((0.01, 0.03, 0.1, 0.3), percents, strict=True):
        capacity = int(share * accesses.num_blocks)
        assert 100 * replay(accesses, capacity, maker(policy)).token_hit_ratio == pytest.approx(percent, abs=0.2)


def test_an_infinite_tier_hits_what_one_hits_that_has_room_for_all() -> None:
    accesses = chats(30)
    assert infinite_hit_ratio(accesses) == replay(accesses, accesses.num_blocks, maker("fifo")).token_hit_ratio
