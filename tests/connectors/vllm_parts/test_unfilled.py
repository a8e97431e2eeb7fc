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


def test_a_load_of_which_nothing_was_heard_counts_as_failed_and_only_once() -> None:
    rig = Rig()
    rig.unfilled.ended(None, ())
    rig.unfilled.ended(None, ())
    assert rig.evicted == [{11, 12, 13}]
