"""What is taken for likely before anything was seen."""

import numpy as np

from policies.eviction.hazards import NUM_BINS, Hazards
from policies.eviction.kinds import OWN, PLACE_KINDS, SHAPE, TAIL, kind_of, shared_gap_of, shared_kind
from policies.eviction.priors import before_seen


def worth(kind: int, age_s: float) -> float:
    return Hazards(SHAPE, before_seen()).index_of(kind, age_s)


def test_all_are_probabilities() -> None:
    hazards = before_seen()
    assert hazards.shape == (*SHAPE, NUM_BINS)
    assert np.isfinite(hazards).all() and (hazards > 0).all() and (hazards < 1).all()


def test_of_two_shared_prefixes_that_with_the_shorter_gap_stays() -> None:
    values = [worth(shared_kind(2, gap_s), 4.0) for gap_s in (2.0, 20.0, 200.0)]
    assert values == sorted(values, reverse=True) and values[0] > 2 * values[1]


def test_a_shared_prefix_is_worth_less_the_longer_it_was_not_used() -> None:
    values = [worth(shared_kind(2, 20.0), age_s) for age_s in (20.0, 200.0, 2_000.0, 20_000.0)]
    assert values == sorted(values, reverse=True)


def test_the_last_block_of_a_prompt_goes_before_the_others() -> None:
    own = OWN * PLACE_KINDS + kind_of(5, None, 1)
    tail = TAIL * PLACE_KINDS + kind_of(5, None, 1)
    for age_s in (0.0, 1.0, 100.0):
        assert worth(tail, age_s) < worth(own, age_s)


def test_the_middle_of_a_gap_feature_is_a_gap_with_that_feature() -> None:
    for gap in range(2, 20):
        assert shared_kind(2, shared_gap_of(gap)) == shared_kind(2, 0.125) + gap - 1
