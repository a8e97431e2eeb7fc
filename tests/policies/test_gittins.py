"""The session-aware policy on made-up sessions, and on the published traces."""

import random
from pathlib import Path

import numpy as np
import pytest

from policies.base import Hint
from policies.eviction import gittins, kinds, request
from policies.eviction.choice import make
from policies.eviction.gittins import Gittins
from policies.eviction.runs import AT_ROOT, BEHIND_SHARED, Runs
from policies.replay import Accesses, accesses_of, replay
from policies.trace import Trace, TraceRequest, read_trace
from tests.support.trees import BLOCK_BYTES, Tree

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def gittins_tree() -> Tree:
    return Tree(lambda tree: Gittins(tree, tree.clock))


def runs_of(tree: Tree) -> Runs:
    assert isinstance(tree.policy, Gittins)
    return tree.policy._runs


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
    assert learned > lru + 0.17, "0.16 while last blocks that came back were not known"


def test_a_session_that_was_evicted_is_known_when_it_returns() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3])
    tree.evict(2)
    tree.now_s = 40.0
    tree.policy.on_access([1])
    tree.insert([2, 4], 1)
    runs = runs_of(tree)
    assert runs.turn[runs.at[[1, 2, 4]]].tolist() == [2, 2, 2]
    assert runs.gap_s[runs.at[1]] == 40.0
    new = runs.kind[runs.at[1]] // (kinds.NUM_GAPS * kinds.NUM_TURNS)
    assert new == 1, "block 4 alone was new"


def test_a_request_is_of_one_class_but_for_its_tail() -> None:
    tree = gittins_tree()
    tree.insert([1, 2])
    tree.now_s = 30.0
    tree.policy.on_access([1, 2])
    tree.insert([3, 4, 5], 2)
    runs = runs_of(tree)
    kinds = runs.kind[runs.at[[1, 2, 3, 4, 5]]].tolist()
    assert len(set(kinds[:4])) == 1
    assert kinds[4] != kinds[0]


def test_a_session_that_returns_again_and_again_leaves_no_life_without_an_end() -> None:
    """Runs that were joined once left one each, and all that is old looked dead."""
    tree = gittins_tree()
    blocks: list[int] = []
    for turn in range(20):
        tree.now_s = 10.0 * turn
        if blocks:
            tree.policy.on_access(blocks)
        new = [3 * turn, 3 * turn + 1]
        tree.insert(new, blocks[-1] if blocks else -1)
        blocks += new
    policy = tree.policy
    assert isinstance(policy, Gittins)
    lives = policy._worth._lives
    still_alive = (lives.lasted_s[: lives.end] == float("inf")).sum()
    assert still_alive <= len({int(run) for run in policy._runs.at[blocks]})


def test_blocks_that_come_one_by_one_are_one_request() -> None:
    tree = gittins_tree()
    for block in range(1, 6):
        tree.insert([block], block - 1 if block > 1 else -1)
        tree.now_s += 1.0
    runs = runs_of(tree)
    assert runs.at[1] == runs.at[4] != runs.at[5]
    assert runs.is_tail[runs.at[5]] and not runs.is_tail[runs.at[1]]
    assert runs.turn[runs.at[[1, 5]]].tolist() == [1, 1]


def test_a_prompt_in_pieces_is_of_the_class_of_the_whole_from_its_first_piece_on() -> None:
    tree = gittins_tree()
    tree.policy.on_request(np.arange(1, 25, dtype=np.uint64), 0)
    tree.insert(range(1, 9))
    runs = runs_of(tree)
    first = int(runs.kind[runs.at[1]])
    tree.insert(range(100, 108))  # another's
    tree.now_s += 1.0
    tree.insert(range(9, 17), 8)
    tree.insert(range(17, 25), 16)
    assert first == runs.kind[runs.at[1]] == runs.kind[runs.at[23]]
    assert runs.at[1] == runs.at[23] != runs.at[24]
    assert first != runs.kind[runs.at[100]]


def test_a_fetch_in_pieces_is_one_use() -> None:
    whole, pieces = gittins_tree(), gittins_tree()
    for tree in (whole, pieces):
        tree.insert(range(1, 21))
        tree.now_s = 40.0
    whole.policy.on_access(range(1, 20))
    for start in (1, 8, 15):
        pieces.policy.on_access(range(start, min(start + 7, 20)))
    for tree in (whole, pieces):
        tree.insert([30, 31], 19)
    ids = [1, 10, 19, 30, 31]
    for column in ("kind", "turn", "gap_s", "at"):
        of_whole, of_pieces = (getattr(runs_of(tree), column) for tree in (whole, pieces))
        if column != "at":
            assert of_whole[runs_of(whole).at[ids]].tolist() == of_pieces[runs_of(pieces).at[ids]].tolist()
    assert runs_of(pieces).at[1] == runs_of(pieces).at[19]


def test_who_asks_again_begins_another_turn_though_it_fetches_nothing() -> None:
    """It has the blocks in its own memory."""
    tree = gittins_tree()
    tree.insert([1, 2, 3])
    tree.now_s = 20.0
    tree.policy.on_request(np.arange(1, 6, dtype=np.uint64), 3)
    tree.insert([4, 5], 3)
    runs = runs_of(tree)
    assert runs.turn[runs.at[[4, 5]]].tolist() == [2, 2]
    assert runs.gap_s[runs.at[4]] == 20.0


def test_what_many_continue_is_known_as_that_also_after_it_left() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4])
    for number in range(3):
        tree.policy.on_access([1, 2])
        tree.insert([10 * number + 10, 10 * number + 11], 2)
    runs = runs_of(tree)
    shared = runs.kind[runs.at[1]]
    assert shared // kinds.PLACE_KINDS == kinds.SHARED
    assert runs.turn[runs.at[30]] == 1, "another session"
    tree.evict(len(tree.held))
    tree.insert([1, 2, 40, 41])
    assert runs.is_shared[runs.at[1]] and not runs.is_shared[runs.at[40]]
    assert runs.kind[runs.at[1]] // kinds.PLACE_KINDS == kinds.SHARED


def test_a_prefix_that_two_share_is_known_as_that_though_the_first_left_before_the_second_came() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4, 5])
    tree.evict(5)
    tree.now_s = 32.0
    tree.insert([1, 2, 6, 7])
    runs = runs_of(tree)
    assert runs.is_shared[runs.at[[1, 2, 6]]].tolist() == [True, True, False]
    assert runs.kind[runs.at[2]] == kinds.shared_kind(2, 32.0)
    assert runs.branch[runs.at[6]] == BEHIND_SHARED
    new = runs.kind[runs.at[6]] // (kinds.NUM_GAPS * kinds.NUM_TURNS)
    assert new == kinds.kind_of(2, None, 1) // (kinds.NUM_GAPS * kinds.NUM_TURNS), "two blocks were new"


def test_a_prompt_whose_last_block_was_full_is_no_prefix_that_others_share() -> None:
    """The next turn has the whole prompt before it. Taken for shared, sessions of a published trace lost 0.8 points."""
    tree = gittins_tree()
    tree.insert([1, 2, 3])
    tree.evict(3)
    tree.now_s = 40.0
    tree.insert([1, 2, 3, 4, 5])
    runs = runs_of(tree)
    assert not runs.is_shared[runs.at[[1, 2, 3, 4]]].any()
    assert runs.turn[runs.at[4]] == 2


def test_a_last_block_that_comes_back_after_it_left_was_used_again() -> None:
    """Where only whole blocks are kept the last one comes back with its session. As it leaves first, nothing was ever
    seen of that, and last blocks left first for ever."""
    tree = gittins_tree()
    blocks: list[int] = []
    for turn in range(60):
        tree.now_s = 20.0 * turn
        new = [2 * turn, 2 * turn + 1]
        if blocks:
            last = blocks[-1]
            tree.remove(last)
            tree.policy.on_access(blocks[:-1])
            new = [last, *new]
        tree.insert(new, blocks[-2] if blocks else -1)
        blocks = [*blocks[:-1], *new]
    policy = tree.policy
    assert isinstance(policy, Gittins)
    runs, worth = policy._runs, policy._worth
    tail, body = (int(runs.at[block]) for block in blocks[-1:-3:-1])
    assert runs.is_tail[tail] and not runs.is_tail[body]
    at_20_s = tree.now_s + 15.0
    assert worth.index(tail, 0, at_20_s) == pytest.approx(worth.index(body, 0, at_20_s), rel=0.2)


def test_only_last_blocks_are_remembered_as_such() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4])
    for block in (4, 3):
        tree.remove(block)
    policy = tree.policy
    assert isinstance(policy, Gittins)
    tail_life = 1  # after that of what is before it
    assert policy._tails.take([1, 2, 3, 4]) == [tail_life]
    assert len(policy._tails) == 0


def test_of_a_template_and_a_question_the_question_goes_first() -> None:
    tree = gittins_tree()
    for first in range(100, 900, 20):
        # Two questions behind each template.
        template = list(range(first, first + 3))
        tree.insert([*template, *range(first + 3, first + 8)])
        tree.now_s += 10.0
        tree.policy.on_access(template)
        tree.insert(range(first + 10, first + 13), template[-1])
        tree.now_s += 10.0
    tree.evict(len(tree.held))
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8])
    tree.now_s += 1.0
    tree.insert([11, 12, 13, 14, 15, 16, 17, 18])
    assert set(tree.evict(10)) == {4, 5, 6, 7, 8, 14, 15, 16, 17, 18}


def test_how_deep_a_block_is_does_not_depend_on_the_pieces_it_came_in() -> None:
    for pieces in ([9], [1, 8], [2, 7], [1] * 9):
        tree = gittins_tree()
        parent, first = -1, 1
        for count in pieces:
            tree.insert(range(first, first + count), parent)
            parent, first = first + count - 1, first + count
        runs = runs_of(tree)
        body = runs.at[1]
        assert (runs.branch[body], runs.before[body], runs.length[body]) == (AT_ROOT, 0, 8), pieces


def test_what_a_hint_parts_is_as_deep_as_before() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4])
    tree.policy.on_hint([1, 2, 3, 4], Hint(returns=True))
    tree.insert([5, 6, 7, 8, 9], 4)
    runs = runs_of(tree)
    assert runs.depths(np.array([5, 6, 7, 8], dtype=np.int32), np.arange(4)).tolist() == [5, 6, 7, 8]
    assert runs.branch[runs.at[5]] == AT_ROOT


def ends_at(tree: Tree) -> list[int]:
    """The depths at which uses ended."""
    policy = tree.policy
    assert isinstance(policy, Gittins)
    ends = policy._worth._reach._ends.sum(axis=(0, 1))
    assert (ends >= 0).all()
    return [int(depth) for depth in ends.nonzero()[0].repeat(ends[ends.nonzero()].astype(int))]


def test_a_use_ends_where_its_last_piece_does() -> None:
    tree = gittins_tree()
    tree.insert(range(1, 11))
    tree.policy.on_access([1, 2, 3, 4])
    tree.now_s += 100.0
    assert ends_at(tree) == [4]
    tree.policy.on_access([1, 2, 3, 4])
    tree.policy.on_access([5, 6, 7, 8])
    assert ends_at(tree) == [4, 8], "the other request's end stays"
    hinted = gittins_tree()
    hinted.insert(range(1, 11))
    hinted.policy.on_hint([1, 2, 3, 4], Hint(returns=True))
    hinted.policy.on_access([1, 2, 3, 4])
    hinted.policy.on_access([5, 6, 7, 8])
    assert ends_at(hinted) == [8]


def test_of_what_comes_back_only_the_last_block_is_an_end() -> None:
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4])
    tree.policy.on_hint([1, 2, 3, 4], Hint(returns=True))
    tree.insert([5, 6, 7, 8, 9], 4)
    tree.evict(9)
    tree.now_s += 10.0
    tree.insert([1, 2, 3, 4, 5, 6, 20, 21])
    assert ends_at(tree) == [6]


def test_a_session_whose_end_is_forgotten_is_not_taken_for_two_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other blocks are remembered for longer."""
    monkeypatch.setattr(request, "_MAX_ENDS", 10)
    tree = gittins_tree()
    tree.insert([1, 2, 3, 4])
    tree.evict(4)
    for first in range(100, 160, 3):
        tree.insert(range(first, first + 3))
        tree.evict(3)
    tree.insert([1, 2, 3, 5, 6, 7])
    runs = runs_of(tree)
    assert not runs.is_shared[runs.at[[1, 2, 3, 5, 6, 7]]].any()
    assert ends_at(tree) == []


def test_a_block_that_is_lost_from_the_middle_is_not_known_by_its_depth() -> None:
    tree = gittins_tree()
    tree.insert(range(1, 12))
    tree.policy.on_remove(3)
    policy = tree.policy
    assert isinstance(policy, Gittins)
    assert policy._past.parts(np.array([3], dtype=np.uint64)) == []


def test_where_too_many_sampled_leaves_must_stay_more_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gittins, "_SAMPLE", 4)
    tree = gittins_tree()
    for block in range(200):
        tree.insert([block])
    tree.stuck = set(range(199))
    assert tree.policy.victims(BLOCK_BYTES) == [199]
    assert tree.policy.victims(2 * BLOCK_BYTES) == []


def test_the_memory_of_what_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_MAX_ENDS", 40)
    tree = gittins_tree()
    for number in range(100):
        tree.insert([2 * number, 2 * number + 1])
        tree.evict(2)
    policy = tree.policy
    assert isinstance(policy, Gittins)
    assert len(policy._ends) == 40


def test_told_who_returns_it_keeps_those() -> None:
    accesses = sessions_and_documents(1)
    told = replay(accesses, 150, lambda tier, _: make("gittins", tier, tier.clock), tells_returns=True)
    assert told.token_hit_ratio > ratio(accesses, 150, "gittins") + 0.01


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here (../shared/traces)")
def test_on_a_published_trace_one_bit_of_hint_is_worth_more_than_any_policy() -> None:
    accesses = accesses_of(read_trace(SHARED / "conversation_trace.jsonl"))
    capacity = int(0.03 * accesses.num_blocks)
    told = replay(accesses, capacity, lambda tier, _: make("gittins", tier, tier.clock), tells_returns=True)
    assert told.token_hit_ratio >= 0.30


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here (../shared/traces)")
@pytest.mark.parametrize(
    ("name", "at_least"), [("conversation", (9.5, 17.5, 29.5, 36.4)), ("synthetic", (4.1, 11.5, 27.7, 51.4))]
)
def test_published_traces_hit_more_than_under_lru(name: str, at_least: tuple[float, ...]) -> None:
    accesses = accesses_of(read_trace(SHARED / f"{name}_trace.jsonl"))
    for share, percent in zip((0.01, 0.03, 0.1, 0.3), at_least, strict=True):
        assert 100 * ratio(accesses, int(share * accesses.num_blocks), "gittins") >= percent
