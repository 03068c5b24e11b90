"""Numbers and names as short text."""

from __future__ import annotations

import pytest

from fl_elastic_simulations.report.formats import (
    MISSING,
    TIMES,
    abbreviated,
    accuracy_text,
    byte_unit,
    bytes_text,
    factor_text,
    percent_text,
    ratio_text,
    seconds_text,
    time_unit,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (42_000_000, "42.0 MB"),
        (3.5e15, "3500 TB"),
        (None, MISSING),
    ],
)
def test_bytes_keep_three_digits_and_never_round_up_to_a_thousand(
    count: float | None, text: str
) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0421, "0.0421 s"),
        (9.999, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (86_400, "24 h 00 min"),
        (200_000, "2 d 08 h"),
        (None, MISSING),
    ],
)
def test_seconds_carry_over_to_the_next_unit(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("share", "text"), [(0, "0 %"), (0.0996, "10 %"), (1.25, "125 %")])
def test_percent_has_a_decimal_below_ten_only(share: float, text: str) -> None:
    assert percent_text(share) == text


def test_ratios_and_factors_differ_in_their_zeros() -> None:
    assert ratio_text(2.0) == f"2.00{TIMES}"
    assert factor_text(2.0) == f"2{TIMES}"
    assert factor_text(100.0) == f"100{TIMES}"
    assert (ratio_text(None), factor_text(None)) == (MISSING, MISSING)


def test_accuracy_shows_the_spread_in_points() -> None:
    assert accuracy_text(0.95, 0.0123) == "95.0 % ± 1.2"
    assert accuracy_text(None, 0.1) == MISSING


def test_units_hold_the_largest_value() -> None:
    assert (byte_unit(0).name, byte_unit(2e9).name, byte_unit(2e9).size) == ("B", "GB", 1e9)
    assert (time_unit(0).name, time_unit(812).name, time_unit(812).size) == ("s", "min", 60)


@pytest.mark.parametrize(
    "name", ["features.denseblock4.denselayer16.conv2", "x" * 80, "a.b.c" * 9, "encoder.layers.3.w"]
)
def test_abbreviated_names_fit_and_keep_their_end(name: str) -> None:
    short = abbreviated(name)
    assert len(short) <= 14
    assert name.endswith(short.rpartition(".")[2][-5:])


def test_abbreviation_keeps_the_numbers_of_blocks_apart() -> None:
    names = [f"features.denseblock{i}.denselayer{j}.conv1" for i in range(4) for j in range(24)]
    assert len({abbreviated(name) for name in names}) == len(names)
