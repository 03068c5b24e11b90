"""Formatting of numbers for readers: bytes, seconds, ratios and shares as short text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MISSING = "\N{EN DASH}"
"""Text for an unknown value."""

TIMES = "\N{MULTIPLICATION SIGN}"
"""Text after a ratio."""

_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_DIGITS = "0123456789"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Unit:
    """A unit for an axis: its name and its size in seconds or bytes."""

    name: str
    size: float


_MOST_SPANS, _NAME_WIDTH = 6, 14
_BYTE_UNITS = tuple(
    Unit(name, 1000.0**power) for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))
)
_TIME_UNITS = (Unit("s", 1), Unit("min", _MINUTE), Unit("h", _HOUR), Unit("d", _DAY))


def _significant(value: float) -> str:
    """Format ``value`` with three significant digits, never with an exponent."""
    if value == 0:
        return "0"
    # Round first: 9.999 must become 10.0, not 10.00.
    rounded = float(f"{value:.2e}")
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def byte_unit(largest: float) -> Unit:
    """Return the decimal unit in which ``largest`` bytes has one to three digits before the point.

    >>> byte_unit(2_500_000).name
    'MB'
    """
    # 999.5 instead of 1000, so that no value is rounded up to "1000 kB".
    fitting = [unit for unit in _BYTE_UNITS if largest >= 0.9995 * unit.size]
    return fitting[-1] if fitting else _BYTE_UNITS[0]


def time_unit(largest: float) -> Unit:
    """Return the unit for a time axis that ends at ``largest`` seconds.

    >>> [time_unit(seconds).name for seconds in (90, 900, 20_000, 400_000)]
    ['s', 'min', 'h', 'd']
    """
    # An axis from 0 to 1.5 min is harder to read than one from 0 to 90 s.
    fitting = [unit for unit in _TIME_UNITS if largest >= 3 * unit.size]
    return fitting[-1] if fitting else _TIME_UNITS[0]


def bytes_text(count: float | None) -> str:
    """Format a number of bytes in decimal units with three digits.

    >>> bytes_text(123), bytes_text(1_234_567), bytes_text(None) == MISSING
    ('123 B', '1.23 MB', True)
    """
    if count is None:
        return MISSING
    unit = byte_unit(count)
    number = f"{count:.0f}" if unit.size == 1 else _significant(count / unit.size)
    return f"{number} {unit.name}"


def seconds_text(seconds: float | None) -> str:
    """Format a duration in its two largest units, or in seconds with three digits below a minute.

    >>> seconds_text(0.25), seconds_text(12.34), seconds_text(812), seconds_text(7500)
    ('0.250 s', '12.3 s', '13 min 32 s', '2 h 05 min')
    """
    if seconds is None:
        return MISSING
    if seconds < _MINUTE - 0.05:
        return f"{_significant(seconds)} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    minutes = round(seconds / _MINUTE)
    if minutes < 2 * _DAY // _MINUTE:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24} d {hours % 24:02d} h"


def ratio_text(ratio: float | None) -> str:
    r"""Format a ratio with three digits and a multiplication sign.

    >>> ratio_text(2.058) == "2.06\N{MULTIPLICATION SIGN}", ratio_text(None) == MISSING
    (True, True)
    """
    return MISSING if ratio is None else f"{_significant(ratio)}{TIMES}"


def factor_text(factor: float | None) -> str:
    r"""Format a factor from a setting as briefly as possible, without trailing zeros.

    >>> factor_text(12.0) == "12\N{MULTIPLICATION SIGN}", factor_text(2.5)[:-1]
    (True, '2.5')
    """
    if factor is None:
        return MISSING
    number = _significant(factor)
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{TIMES}"


def percent_text(share: float | None) -> str:
    """Format a share of one as percent, with one decimal below ten percent.

    >>> percent_text(0.384), percent_text(0.0123), percent_text(1)
    ('38 %', '1.2 %', '100 %')
    """
    if share is None:
        return MISSING
    percent = 100 * share
    return f"{percent:.0f} %" if percent == 0 or abs(percent) >= 9.95 else f"{percent:.1f} %"


def accuracy_text(mean: float | None, deviation: float | None = None) -> str:
    """Format an accuracy as percent, with its standard deviation in percentage points if given.

    >>> accuracy_text(0.9512, 0.0104), accuracy_text(0.5)
    ('95.1 % ± 1.0', '50.0 %')
    """
    if mean is None:
        return MISSING
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * mean:.1f} %{spread}"


def spans_text(numbers: Iterable[int]) -> str:
    """Format integers as spans; if there are many spans, only their count, the first and the last number.

    >>> spans_text([3, 1, 2, 7]) == f"1{MISSING}3, 7", spans_text(range(1, 40, 2))
    (True, '20 from 1 to 39')
    """
    ordered = sorted(set(numbers))
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    if len(spans) > _MOST_SPANS:
        return f"{len(ordered)} from {ordered[0]} to {ordered[-1]}"
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}{MISSING}{s[-1]}" for s in spans]
    return ", ".join(texts)


def abbreviated(name: str) -> str:
    """Shorten a long dotted name: first reduce outer parts to a letter and their number, then cut the middle.

    >>> abbreviated("layer4.0.conv1")
    'layer4.0.conv1'
    >>> abbreviated("features.denseblock4.denselayer16.conv2")
    'f.d4.d16.conv2'
    >>> abbreviated("a_layer_of_no_parts")
    'a_la…_no_parts'
    """
    if len(name) <= _NAME_WIDTH:
        return name
    *outer, last = name.split(".")
    short = ".".join([*(_initial(part) for part in outer), last])
    if len(short) <= _NAME_WIDTH:
        return short
    # The end, which distinguishes layers, keeps more letters than the beginning.
    head = (_NAME_WIDTH - 1) // 3
    return f"{short[:head]}{_ELLIPSIS}{short[head + 1 - _NAME_WIDTH :]}"


def _initial(part: str) -> str:
    """Return the first letter of a part, and the number at its end."""
    return part[:1] + part[1:][len(part[1:].rstrip(_DIGITS)) :]
