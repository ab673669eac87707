from __future__ import annotations

import pytest

from impress_cli import units
from store.errors import InvalidValueError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500MB", 500_000_000),
        ("2GiB", 2 * 2**30),
        ("1.5 kB", 1500),
        ("20g", 20_000_000_000),
        ("4096", 4096),
        ("1 b", 1),
    ],
)
def test_sizes_are_read_with_decimal_and_binary_units(text: str, expected: int) -> None:
    assert units.parse_size(text, "--max-size") == expected


@pytest.mark.parametrize("text", ["", "MB", "12 parsecs", "-5MB", "5MB/s", "0", "0.1b", "1..5MB"])
def test_a_size_that_is_none_or_leaves_no_room_names_option_and_value(text: str) -> None:
    with pytest.raises(InvalidValueError, match="--max-size") as caught:
        units.parse_size(text, "--max-size")
    assert repr(text) in str(caught.value)


def test_a_rate_needs_per_second() -> None:
    assert units.parse_rate("250MB/s", "--disk-bandwidth") == 250e6
    with pytest.raises(InvalidValueError, match="such as 250MB/s"):
        units.parse_rate("250MB", "--disk-bandwidth")
    with pytest.raises(InvalidValueError, match="no room"):
        units.parse_rate("0MB/s", "--disk-bandwidth")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200us", 2e-4), ("200µs", 2e-4), ("5ms", 5e-3), ("1.5s", 1.5), ("0", 0.0), ("2min", 120.0)],
)
def test_times_are_read_in_seconds(text: str, expected: float) -> None:
    assert units.parse_duration(text, "--disk-latency") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["200", "fast", "-1ms", "5 MB", ""])
def test_a_time_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="--disk-latency"):
        units.parse_duration(text, "--disk-latency")


def test_retention_is_a_fraction_or_a_percentage() -> None:
    assert units.parse_retention("0.25", "--retention") == 0.25
    assert units.parse_retention("25%", "--retention") == 0.25
    assert units.parse_retention("1", "--retention") == 1.0


@pytest.mark.parametrize("text", ["0", "-0.1", "1.01", "101%", "nan", "inf", "some"])
def test_retention_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="above 0 and up to 1"):
        units.parse_retention(text, "--retention")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (29_100_000, "29.1 MB"),
        (94_371_840, "94.4 MB"),
        (999_600, "1.00 MB"),
        (1.5e15, "1500 TB"),
    ],
)
def test_bytes_are_shown_with_about_three_digits(size: float, expected: str) -> None:
    assert units.format_bytes(size) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.006, "6 ms"),
        (0.142, "142 ms"),
        (0.9999, "1.00 s"),
        (5.9, "5.90 s"),
        (42.0, "42.0 s"),
        (200.0, "3 min 20 s"),
        (7260.0, "2 h 1 min"),
    ],
)
def test_times_are_shown_in_the_unit_that_reads_best(seconds: float, expected: str) -> None:
    assert units.format_seconds(seconds) == expected


def test_counts_and_percentages_are_grouped_and_rounded() -> None:
    assert units.format_count(4096) == "4 096"
    assert units.format_percent(0.314) == "31 %"
    assert units.format_percent(0.078) == "7.8 %"
    assert units.format_percent(0.0) == "0 %"
