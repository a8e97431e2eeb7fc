"""The fit finds what measurements show, keeps what they do not show as it was, and says how sure it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fit import Fitted, Floats, Prior, fit, known

GUESS = Prior((1.0, 3.0), doubt=2.0, may_be_far=True)


def fitted(rows: list[tuple[float, ...]], seconds: list[float], prior: Prior = GUESS) -> Fitted:
    exact = np.array(seconds)
    return fit(np.array(rows).reshape(len(rows), len(prior.coefficients)), exact, exact, prior)


def test_a_coefficient_that_nothing_showed_has_the_proportion_of_the_prior() -> None:
    assert fitted([(1.0, 0.0)] * 5, [2.0] * 5).coefficients == pytest.approx((2.0, 6.0), rel=0.01)
    assert fitted([], []).coefficients == (1.0, 3.0)


def test_exact_measurements_give_the_exact_coefficients() -> None:
    rows = [(1.0, float(size)) for size in range(1, 21)]
    assert fitted(rows, [7 + 0.25 * size for _, size in rows]).coefficients == pytest.approx((7, 0.25), rel=0.01)


def test_one_term_may_be_far_from_the_prior_if_it_is_said_to() -> None:
    rows = [(1.0, 1000.0 * size) for size in (4, 9, 20, 33, 100)]
    seconds = [1e-3 + 2e-6 * size for _, size in rows]
    guess = Prior((0.05, 1e-9), doubt=2.0, may_be_far=True)
    assert fitted(rows, seconds, guess).coefficients == pytest.approx((1e-3, 2e-6), rel=0.05)


def test_wrong_measurements_have_no_say() -> None:
    rows = [(1.0, float(size)) for size in range(1, 31)]
    seconds = [7 + 0.25 * size for _, size in rows]
    for wrong in range(0, 30, 5):
        seconds[wrong] *= 5
    assert fitted(rows, seconds).coefficients == pytest.approx((7, 0.25), rel=0.02)


def test_a_minority_of_another_kind_is_not_taken_for_wrong() -> None:
    rows = [(1.0, 100.0)] * 40 + [(1.0, 1.0)] * 4
    assert fitted(rows, [50 + size for _, size in rows]).coefficients == pytest.approx((50, 1), rel=0.05)


def test_no_coefficient_is_below_zero_where_the_best_free_one_would_be() -> None:
    rows = [(1.0, float(size)) for size in (1, 2, 3, 4)] * 5
    latency, per_size = fitted(rows, [4.0, 3.0, 2.0, 1.0] * 5).coefficients
    assert latency > 0
    assert per_size == 0.0


def test_the_spread_is_small_where_it_was_measured_and_large_elsewhere() -> None:
    near = fitted([(1.0, 1.0)] * 20, [2.0] * 20)
    assert near.spread((1.0, 1.0)) < 0.02
    assert near.spread((1.0, 1000.0)) > 0.2
    assert fitted([], []).spread((1.0, 0.0)) == pytest.approx(2.0)
    assert near.slower(3.0).spread((1.0, 1.0)) == pytest.approx(near.spread((1.0, 1.0)))


def test_a_known_size_resists_a_single_measurement_and_not_several() -> None:
    known = Prior((1.0, 1.0), doubt=0.5, anchor=1.5)
    assert sum(fitted([(1.0, 1.0)], [10.0], known).coefficients) < 9
    assert sum(fitted([(1.0, 1.0)] * 10, [10.0] * 10, known).coefficients) == pytest.approx(10, rel=0.05)


def test_what_was_fitted_to_zero_may_be_wrong_too() -> None:
    prior = known((4.0, 0.0), Prior((1.0, 2.0), 2.0), doubt=0.5)
    assert fitted([], [], prior).coefficients == (4.0, 0.0)
    assert prior.scale.tolist() == pytest.approx([4.0, 0.16])
    rows = [(1.0, float(size)) for size in range(20)]
    assert fitted(rows, [4 + 0.3 * size for _, size in rows], prior).coefficients == pytest.approx((4, 0.3), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.floats(1, 1e9), st.floats(1e-6, 1e3), st.floats(0, 1)),
        min_size=1,
        max_size=60,
    ),
    st.booleans(),
)
def test_whatever_was_measured_there_is_an_answer(samples: list[tuple[float, ...]], may_be_far: bool) -> None:
    rows = np.array([(one, size) for one, size, _, _ in samples])
    most = np.array([seconds for _, _, seconds, _ in samples])
    least: Floats = most * np.array([1 - 0.9 * share for *_, share in samples])
    found = fit(rows, least, most, Prior((0.05, 1e-8), 2.0, may_be_far=may_be_far))
    assert min(found.coefficients) >= 0
    assert np.isfinite(found.coefficients).all()
    assert np.isfinite(found.covariance).all()
