"""The colours, checked with formulas of contrast and of colour blindness."""

from __future__ import annotations

import itertools
import math
import re
from importlib.resources import files

import numpy as np
import pytest

from fl_elastic_simulations.report.palette import COLOURS, ink

STYLE = files("fl_elastic_simulations.report").joinpath("templates/base.html.md").read_text()

# Machado, Oliveira, Fernandes 2009, severity 1.0, for linear RGB.
VISION = {
    "full": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> np.ndarray:
    """Return linear RGB of a colour written as #rrggbb."""
    values = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Return the contrast of WCAG 2.1."""
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """Return CIE Lab of a colour as somebody with this vision sees it."""
    ratio = TO_XYZ @ np.clip(vision @ linear(colour), 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colour", COLOURS)
def test_each_colour_stands_out_on_light_and_on_dark(colour: str) -> None:
    grounds = re.findall(r"--surface: (#\w{6})", STYLE)
    assert len(grounds) == 2
    assert min(contrast(colour, ground) for ground in grounds) >= 3


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_stay_apart(vision: str) -> None:
    seen = [lab(colour, VISION[vision]) for colour in COLOURS]
    assert min(math.dist(one, other) for one, other in itertools.combinations(seen, 2)) >= 20


def test_methods_beyond_the_colours_are_still_told_apart() -> None:
    inks = {ink(position) for position in range(2 * len(COLOURS))}
    assert len(inks) == 2 * len(COLOURS)
