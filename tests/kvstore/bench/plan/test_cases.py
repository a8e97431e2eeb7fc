"""Which cases and which fixed cuts are run."""

import pytest

from kvstore.bench.plan.cases import LINKS, PREFIXES, SCENARIOS, CutSearch, LinkSetting, cases


def test_every_scenario_meets_every_link_and_prefix_but_for_the_broken_link() -> None:
    found = list(cases(LINKS, PREFIXES, SCENARIOS))
    assert len(found) == len({case.name for case in found}) == 5 * 4 * 3
    assert {case.scenario for case in found} == {"idle", "beside", "split"}
    assert all(case.head_tokens == (case.prefix_tokens // 2 if case.scenario == "split" else 0) for case in found)


def test_the_cases_of_a_link_come_together() -> None:
    order = [case.link for case in cases(LINKS, (256,), ("idle", "beside"))]
    assert order == sorted(order, key=LINKS.index)


def test_a_link_has_a_name_that_a_file_may_have() -> None:
    assert LinkSetting(20, 30).name == "20ms-30MBps"
    assert LinkSetting(0.5, 2.5).name == "0.5ms-2.5MBps"


def searched(prefix: int, best: int, always: tuple[int, ...] = ()) -> list[list[int]]:
    search, rounds = CutSearch(prefix, 256, always), []
    while found := search.next(best):
        rounds.append(found)
    return rounds


def test_the_search_goes_to_both_sides_of_the_best_cut() -> None:
    assert searched(2048, 1024) == [[1024], [512, 1536], [768, 1280]]


@pytest.mark.parametrize(("best", "last"), [(2048, 1792), (0, 256)])
def test_where_a_pure_plan_is_best_the_cuts_beside_it_are_run(best: int, last: int) -> None:
    rounds = searched(2048, best)
    assert rounds[0] == [1024]
    assert rounds[-1] == [last]


def test_the_border_between_two_tiers_is_always_run_and_no_cut_twice() -> None:
    rounds = searched(512, 0, always=(256,))
    assert rounds == [[256]]
    assert searched(256, 0, always=(128,)) == [[128]]
    assert searched(256, 0) == []


def test_every_cut_is_found_where_it_is_the_best_of_its_surroundings() -> None:
    for best in range(256, 2048, 256):
        search, seen, at = CutSearch(2048, 256), {0, 2048}, 2048
        while found := search.next(at):
            seen |= set(found)
            # The nearest of what was run is the best, as where time grows with the distance.
            at = min(seen, key=lambda cut: abs(cut - best))
        assert at == best
