import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.units import approximate_size, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1kB", 1000),
        ("500MB", 500_000_000),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5GiB", 3 << 29),
        (" 2TiB ", 2 << 40),
        ("1.07TB", 1_070_000_000_000),
    ],
)
def test_a_size_is_binary_or_decimal_as_its_unit_says(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "8G", "8Gb it", "1e3", "0.5B", "9999999PiB", "1,5GiB", "nan", "٣GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("30", 30.0), ("30s", 30.0), ("250ms", 0.25), ("1.5s", 1.5), ("2m", 120.0), ("12h", 43200.0), ("7d", 604800.0)],
)
def test_a_duration_is_in_the_unit_it_names(text: str, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["", "d", "-1s", "7days", "1y", "99999999999d", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_duration(text)


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back_as_the_same(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


@given(st.integers(0, 10**9).map(lambda ms: ms / 1000))
def test_a_formatted_duration_reads_back_as_the_same(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == pytest.approx(duration_s)


def test_formatted_values_use_the_unit_people_would() -> None:
    assert [format_size(n) for n in (0, 1 << 30, 3 << 29, 500)] == ["0B", "1GiB", "1536MiB", "500B"]
    assert [format_duration(s) for s in (0.25, 10, 604800, 2 * 604800)] == ["0.25s", "10s", "7d", "2w"]
    assert [approximate_size(n) for n in (12, 1536, 1_570_000_000)] == ["12 B", "1.5 KiB", "1.46 GiB"]
