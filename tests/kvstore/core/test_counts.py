"""Counts by kind, which no client can make grow."""

from kvstore.core.counts import Counts


def test_kinds_beyond_so_many_and_names_that_are_none_count_as_other() -> None:
    counts = Counts()
    for number in range(1000):
        counts.add(f"kind_{number}")
    for odd in ("", "a b", "x" * 65, "né", "new\nline", '"}'):
        counts.add(odd)
    counts.add("kind_3", 5)
    counts.add("kind_3", -5)
    snapshot = counts.snapshot()
    assert len(snapshot) == 65 and snapshot["kind_3"] == 6
    assert snapshot["other"] == 1000 - 64 + 6


def test_a_count_never_leaves_what_json_can_say() -> None:
    counts = Counts()
    for _ in range(3):
        counts.add("huge", 1 << 62)
    assert counts.snapshot() == {"huge": 1 << 53}
