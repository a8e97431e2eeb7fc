"""The tier contract on the HBM tier, which holds blocks of one size only: the promises of `test_tier.py` that can be
asked of it, with one and with two pool blocks per block."""

from collections.abc import Callable

import pytest
import torch

from tests.contracts import test_tier as contract
from tiers.base import Tier
from tiers.hbm import HbmTier

_TOKENS = 4
_PROMISES: list[Callable[[Tier], None]] = [
    contract.test_each_call_answers_once_per_key_and_only_what_it_may,
    contract.test_only_what_was_stored_is_found,
    contract.test_an_empty_batch_has_an_empty_answer,
    contract.test_an_unknown_block_is_a_miss,
    contract.test_views_of_the_wrong_length_are_a_fault_of_the_caller,
    contract.test_a_tier_names_itself_and_its_use_and_closes_twice,
    contract.test_a_batch_answers_in_order,
    contract.test_a_block_that_is_there_is_left_alone,
    contract.test_a_block_twice_in_one_batch_is_stored_once,
    contract.test_a_deleted_block_is_gone_and_can_be_stored_again,
    contract.test_another_block_under_the_same_key_is_corrupt_and_goes,
    contract.test_a_block_of_another_length_is_corrupt,
    contract.test_use_follows_what_is_stored,
]


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("promise", _PROMISES, ids=lambda promise: promise.__name__.removeprefix("test_"))
def test_the_hbm_tier_keeps(promise: Callable[[Tier], None], per_block: int) -> None:
    promise(_tier(8192, per_block))


def test_many_threads_at_once_see_whole_blocks() -> None:
    contract.test_many_threads_at_once_see_whole_blocks(_tier(20_000, 1))


def _tier(payload_bytes: int, per_block: int) -> HbmTier:
    head_dim = payload_bytes // (per_block * 2 * _TOKENS)
    return HbmTier(torch.zeros(48, 1, 2, _TOKENS, 1, head_dim, dtype=torch.uint8), _TOKENS * per_block)
