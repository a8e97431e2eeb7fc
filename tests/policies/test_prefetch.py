"""When a session is expected back, from pauses of a clock of the test's own."""

from policies.prefetch import Return, Returns


def live(returns: Returns, session: str, *gaps_s: float, start_s: float = 0.0) -> Return | None:
    """Turns that take two seconds each, with these pauses between them; return what is expected after the last."""
    now_s = start_s
    expected = returns.ended(session, now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        returns.began(session, now_s)
        now_s += 2.0
        expected = returns.ended(session, now_s)
    return expected


def test_nothing_is_expected_of_who_paused_less_than_twice() -> None:
    assert live(Returns(), "a") is None
    assert live(Returns(), "b", 30.0) is None


def test_a_return_is_expected_from_before_the_shortest_to_after_the_longest_pause() -> None:
    expected = live(Returns(), "a", 30.0, 40.0, 50.0)
    assert expected is not None
    assert 10.0 < expected.earliest_s < 30.0 and 50.0 < expected.latest_s < 100.0


def test_the_last_pauses_count_and_old_ones_are_forgotten() -> None:
    expected = live(Returns(), "a", 300.0, *[30.0] * 8)
    assert expected == live(Returns(), "b", *[30.0] * 8)


def test_pauses_that_differ_wildly_predict_nothing() -> None:
    assert live(Returns(), "a", 5.0, 3600.0) is None


def test_short_pauses_are_expected_at_once() -> None:
    expected = live(Returns(), "a", 1.0, 1.5)
    assert expected is not None and expected.earliest_s == 0.0


def test_a_turn_whose_beginning_was_not_seen_and_one_seen_twice_count_once() -> None:
    returns = Returns()
    for now_s in (0.0, 30.0, 60.0):
        seen = returns.ended("a", now_s)
    twice = Returns()
    for now_s in (0.0, 30.0, 60.0):
        twice.began("a", now_s)
        twice.began("a", now_s + 5.0)
        again = twice.ended("a", now_s)
    assert seen == again is not None


def test_no_more_sessions_are_remembered_than_may_be() -> None:
    returns = Returns(max_sessions=3)
    for number in range(10):
        live(returns, str(number), 30.0, 30.0)
    assert len(returns) == 3
    returns.forget("9")
    returns.forget("9")
    assert len(returns) == 2
