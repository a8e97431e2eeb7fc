import pytest

from kvstore.connectors.vllm_parts.stats import Counters, Report, is_empty, merged, sound, summary
from tests.support.vllm import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_report_holds_what_is_new_since_the_last_one(clock: Clock) -> None:
    counters = Counters(clock)
    counters.add("loaded_blocks", "ram", 3)
    counters.add("loaded_blocks", "ram")
    counters.add("stored_bytes", count=100)
    counters.took("load", 0.25)
    report = counters.take()
    assert report is not None
    assert report["counts"] == {"loaded_blocks|ram": 4, "stored_bytes": 100}
    assert report["seconds"] == {"load": [0.25]}
    clock.now += 1
    assert counters.take() is None


def test_reports_are_not_taken_more_often_than_they_are_worth_and_lose_nothing(clock: Clock) -> None:
    counters = Counters(clock)
    assert counters.take() is None
    counters.add("stored_bytes", count=1)
    assert counters.take() is None
    counters.add("stored_bytes", count=2)
    clock.now += 0.1
    report = counters.take()
    assert report is not None
    assert report["counts"] == {"stored_bytes": 3}


def test_a_level_is_told_when_it_has_changed(clock: Clock) -> None:
    counters = Counters(clock)
    level = 1.0
    counters.level("attached", "worker", lambda: level)
    told = []
    for level in (1.0, 1.0, 0.0):  # noqa: B007
        clock.now += 1
        report = counters.take()
        told.append(None if report is None else report["levels"])
    assert told == [{"attached|worker": 1.0}, None, {"attached|worker": 0.0}]


def test_reports_of_several_workers_add_up() -> None:
    first = Report(counts={"loads|loaded": 1}, levels={"attached|worker": 0.0}, seconds={"load": [0.1]})
    second = Report(counts={"loads|loaded": 2, "loads|silent": 1}, levels={"attached|worker": 1.0}, seconds={})
    both = merged(first, second)
    assert both["counts"] == {"loads|loaded": 3, "loads|silent": 1}
    assert both["levels"] == {"attached|worker": 1.0}
    assert summary(both) == {"kvstore_loads_loaded": 3, "kvstore_loads_silent": 1, "kvstore_load_ms_mean": 100.0}


def test_a_report_that_lacks_parts_is_taken_for_one_without_them() -> None:
    assert is_empty(sound(None))
    assert sound({"counts": {"loads|loaded": 1}})["counts"] == {"loads|loaded": 1}


def test_a_name_that_no_metric_has_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        Counters().add("unheard_of")
