"""Timings, their ratios, taking turns, and the memory that is copied."""

from collections.abc import Callable

from kvstore.bench.memory import PAGE_BYTES, Buffers, address, copy, memcpy
from kvstore.bench.samples import Compared, Timing, in_turns, shuffled, worst


def test_a_ratio_is_that_of_the_medians_and_above_one_where_we_are_faster() -> None:
    compared = Compared(Timing((1.0, 2.0, 9.0), 10**9), {"plain": Timing((4.0, 4.0, 1.0), 10**9)})
    assert compared.ratio == 2.0
    assert compared.as_json()["ours"]["gb_per_s"] == 0.5
    assert compared.as_json()["ceilings"]["plain"]["gb_per_s"] == 0.25


def test_the_ceiling_is_the_fastest_way_by_median() -> None:
    compared = Compared(Timing((1.0,)), {"a": Timing((3.0, 3.0, 0.1)), "b": Timing((2.0, 2.0, 2.0))})
    assert compared.ceiling == "b"
    assert compared.as_json()["ratios"] == {"a": 3.0, "b": 2.0}
    assert compared.ratio == 2.0
    assert worst({"x": compared, "y": Compared(Timing((4.0,)), {"b": Timing((2.0,))})}) == 0.5


def test_a_timing_tells_its_spread_and_percentiles() -> None:
    timing = Timing(tuple(float(number) for number in range(1, 101)))
    assert timing.percentile_s(0.99) == 99.0
    assert timing.percentile_s(1.0) == 100.0
    figures = timing.as_json()
    assert (figures["runs"], figures["min_s"], figures["max_s"], figures["iqr_s"]) == (100, 1.0, 100.0, [25.0, 75.0])
    assert "gb_per_s" not in figures


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[int], dict[str, float]]:
        def run(number: int) -> dict[str, float]:
            order.append(f"{name}{number}")
            return {name: float(number)}

        return run

    seconds = in_turns([contender("a"), contender("b")], 3, lambda: None)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]
    assert seconds == {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0]}


def test_a_random_order_is_the_same_for_everybody() -> None:
    assert shuffled(100, 1) == shuffled(100, 1) != shuffled(100, 2)
    assert sorted(shuffled(100, 1)) == list(range(100))


def test_buffers_begin_on_pages_and_hold_different_bytes() -> None:
    buffers = Buffers(3, 5000)
    assert all(address(view) % PAGE_BYTES == 0 for view in buffers.views)
    assert len({bytes(view) for view in buffers.views}) == 3
    for copies in (copy, memcpy):
        target = memoryview(bytearray(5000))
        copies(target, buffers.views[1])
        assert target == buffers.views[1]
