from typing import Any

from kvstore.connectors.vllm_parts.orders import News
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.connectors.vllm_parts.unfilled import Unfilled
from kvstore.connectors.vllm_parts.wishes import Wishes
from tests.support.vllm import FakeRequest


def tracked(request_id: str, block_ids: list[int]) -> Tracked:
    return Tracked(FakeRequest(request_id, [1]), Wishes(), 0.0, block_ids=block_ids)


class Rig:
    def __init__(self) -> None:
        self.evicted: list[set[int]] = []
        self.unfilled = Unfilled(self.evicted.append)
        self.unfilled.begun("a", (11, 12, 13))

    def ended(self, *requests: Tracked, **news: Any) -> None:
        self.unfilled.ended(News(**news), requests)


def test_what_did_not_come_is_evicted_and_all_that_was_computed_over_it() -> None:
    rig = Rig()
    mine, sharing, other = tracked("a", [10, 11, 12, 13, 14]), tracked("b", [10, 11, 12, 20]), tracked("c", [10, 11])
    rig.ended(mine, sharing, other, num_ended={"a": 1}, failed_from={"a": 1})
    assert rig.evicted == [{12, 13, 14, 20}]
    assert (mine.may_store, sharing.may_store, other.may_store) == (True, False, True)


def test_who_fails_itself_behind_what_another_was_to_load_stores_nothing_more() -> None:
    """It computes its own part again, over the other's: which is right only where that one computes its part."""
    rig = Rig()
    rig.unfilled.begun("b", (20, 21))
    first, second = tracked("a", [10, 11, 12, 13]), tracked("b", [10, 11, 12, 20, 21])
    rig.ended(first, second, num_ended={"a": 1, "b": 1}, failed_from={"a": 1, "b": 0})
    assert (first.may_store, second.may_store) == (True, False)


def test_what_came_stays() -> None:
    rig = Rig()
    rig.ended(tracked("a", [10, 11, 12, 13]), num_ended={"a": 1})
    assert rig.evicted == []


def test_requests_that_ended_in_the_step_are_not_forgotten() -> None:
    """vLLM takes aborts between a step and what came of it."""
    rig = Rig()
    rig.unfilled.left([10, 11, 12, 13, 14])
    rig.ended(num_ended={"a": 1}, failed_from={"a": 2})
    assert rig.evicted == [{13, 14}]


def test_who_leaves_before_it_computed_again_what_others_go_on_over_leaves_wrong_blocks() -> None:
    """What the others computed from then on was wrong, hit by a third, and stored."""
    rig = Rig()
    mine, sharing = tracked("a", [10, 11, 12, 13, 14]), tracked("b", [10, 11, 12, 20])
    rig.ended(mine, sharing, num_ended={"a": 1}, failed_from={"a": 1})
    rig.unfilled.computed("a", [13])
    assert rig.unfilled.leaves("a", [sharing])
    assert not rig.unfilled.leaves("a", [sharing])


def test_who_computed_again_what_did_not_come_leaves_nothing_wrong() -> None:
    rig = Rig()
    mine, sharing = tracked("a", [10, 11, 12, 13, 14]), tracked("b", [10, 11, 12, 20])
    rig.ended(mine, sharing, num_ended={"a": 1}, failed_from={"a": 1})
    rig.unfilled.computed("a", [12])
    rig.unfilled.computed("a", [13, 14])
    assert not rig.unfilled.leaves("a", [sharing])


def test_who_alone_had_the_blocks_leaves_nothing_wrong() -> None:
    rig = Rig()
    rig.ended(tracked("a", [10, 11, 12, 13]), tracked("c", [10, 20]), num_ended={"a": 1}, failed_from={"a": 0})
    assert not rig.unfilled.leaves("a", [tracked("c", [10, 20])])


def test_a_load_of_which_nothing_was_heard_counts_as_failed_and_only_once() -> None:
    rig = Rig()
    rig.unfilled.ended(None, ())
    rig.unfilled.ended(None, ())
    assert rig.evicted == [{11, 12, 13}]
