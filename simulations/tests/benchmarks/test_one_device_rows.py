"""What the benchmark of one device does with a few examples."""

from __future__ import annotations

import pytest

from fl_elastic_simulations.benchmarks import one_device
from fl_elastic_simulations.benchmarks.one_device import (
    METHODS,
    elsewhere_markdown,
    one_device_cell,
)
from fl_elastic_simulations.data.datasets import data_root_folder

BY_NAME = {each.name: each for each in METHODS}
_WEIGHTS = data_root_folder(None) / one_device._WEIGHTS


def test_a_row_of_other_images_pairs_the_seeds_that_both_have() -> None:
    def cell(accuracy: float, seconds: float, reads: str = "") -> dict[str, object]:
        return {"accuracy": accuracy, "seconds": seconds, "reads": reads}

    rows = {
        "signs: full | 0.0003 | 0": cell(0.9, 100.0),
        "signs: full | 0.0003 | 1": cell(0.8, 200.0),
        "signs: chosen places | 0.0003 | 0": cell(0.95, 10.0, "a@grid4"),
        "signs: chosen places | 0.0003 | 1": cell(0.87, 10.0, "b@grid4"),
        "signs: solved head | 0.0003 | 0": cell(0.4, 4.0),
        "signs: solved head | 0.0003 | 2": cell(0.9, 4.0),
    }
    title = "traffic signs at 64 pixels"
    assert elsewhere_markdown(rows).split("\n")[2:] == [
        f"| {title} | full | 2 | 85.0 | +0.0 | 1.000 | last layer |",
        f"| {title} | solved head | 1 | 40.0 | -50.0 | 0.040 | last layer |",
        f"| {title} | chosen places | 2 | 91.0 | +6.0 | 0.075 | a@grid4; b@grid4 |",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not _WEIGHTS.exists(), reason="needs the pretrained weights")
@pytest.mark.parametrize(
    "name", ["solved head", "full, 2 epochs", "solved head, block 14, 2 epochs"]
)
def test_a_cell_trains_what_it_says(name: str) -> None:
    row = one_device_cell(BY_NAME[name], 3e-4, 0, str(data_root_folder(None)), examples=48)
    method = BY_NAME[name]
    assert row["steps"] == 3 * method.epochs and row["accuracy"] > 0.02
    if method.cut:
        # The pass for sums left them all.
        assert (row["features_found"], row["refused"]) == (96, "")
        assert row["step_seconds"] < row["seconds"]
