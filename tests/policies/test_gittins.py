"""The session-aware policy on made-up sessions, and on the published traces."""

import random
from pathlib import Path

import pytest

from policies.eviction import gittins
from policies.eviction.choice import make
from policies.eviction.gittins import Gittins
from policies.replay import Accesses, accesses_of, replay
from policies.trace import Trace, TraceRequest, read_trace
from tests.support.trees import BLOCK_BYTES, Tree

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def gittins_tree() -> Tree:
    return Tree(lambda tree: Gittins(tree, tree.clock))


def ratio(accesses: Accesses, capacity: int, name: str) -> float:
    return replay(accesses, capacity, lambda tier, _: make(name, tier, tier.clock)).token_hit_ratio


def sessions_and_documents(seed: int) -> Accesses:
    """Chats of 4 turns, a minute apart, that grow by two blocks, between long documents that nobody asks for again."""
    choice = random.Random(seed)
    requests: list[tuple[float, tuple[int, ...]]] = []
    for number in range(400):
        start_s = choice.uniform(0, 2_000)
        chat = tuple(range(1000 * number, 1000 * number + 8))
        for turn in range(4):
            requests.append((start_s + turn * choice.uniform(50, 70), chat[: 2 * turn + 2]))
        for document in range(2):
            first = 10_000_000 + 1000 * (2 * number + document)
            requests.append((choice.uniform(0, 2_000), tuple(range(first, first + 16))))
    requests.sort()
    return accesses_of(Trace([TraceRequest(at, 10 * len(ids), 1, ids) for at, ids in requests], 10))


def test_sessions_outlast_long_prompts_that_come_once() -> None:
    """LRU has room for about 20 s; chats return after a minute."""
    accesses = sessions_and_documents(1)
    lru, learned = (ratio(accesses, 150, name) for name in ("lru", "gittins"))
    assert lru < 0.02
    assert learned > lru + 0.05


def test_a_session_that_was_evicted_is_known_when_it_returns() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3])
    tree.evict(2)
    tree.now_s = 40.0
    tree.policy.on_access([1])
    tree.insert([2, 3], 1)
    policy = tree.policy
    assert isinstance(policy, Gittins)
    assert policy._turns[[1, 2, 3]].tolist() == [2, 2, 2]
    new = tree.policy._kinds[1] // (gittins._GAPS * gittins._TURNS)
    assert new == 0, "none of its blocks was new"


def test_a_request_is_of_one_class_but_for_its_tail() -> None:
    tree = gittins_tree()
    tree.insert([1, 2])
    tree.now_s = 30.0
    tree.policy.on_access([1, 2])
    tree.insert([3, 4, 5], 2)
    policy = tree.policy
    assert isinstance(policy, Gittins)
    kinds = policy._kinds[[1, 2, 3, 4, 5]].tolist()
    assert len(set(kinds[:4])) == 1
    assert kinds[4] != kinds[0]


def test_where_too_many_sampled_leaves_must_stay_more_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gittins, "_SAMPLE", 4)
    tree = gittins_tree()
    for block in range(200):
        tree.insert([block])
    tree.stuck = set(range(199))
    assert tree.policy.victims(BLOCK_BYTES) == [199]
    assert tree.policy.victims(2 * BLOCK_BYTES) == []


def test_in_a_large_tier_a_share_of_the_blocks_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gittins, "_LIVES", 400)
    tree = gittins_tree()
    for block in range(800):
        tree.insert([block])
    policy = tree.policy
    assert isinstance(policy, Gittins)
    assert 20 < len(policy._hazards._newest) < 400


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here (../shared/traces)")
@pytest.mark.parametrize(("name", "at_least"), [("conversation", (9.2, 17.2, 29.5)), ("synthetic", (4.1, 11.4, 27.0))])
def test_published_traces_hit_more_than_under_lru(name: str, at_least: tuple[float, ...]) -> None:
    accesses = accesses_of(read_trace(SHARED / f"{name}_trace.jsonl"))
    for share, percent in zip((0.01, 0.03, 0.1), at_least, strict=True):
        assert 100 * ratio(accesses, int(share * accesses.num_blocks), "gittins") >= percent
