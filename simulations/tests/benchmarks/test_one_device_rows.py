"""What the benchmark of one device does with a few examples."""

from __future__ import annotations

import pytest

from fl_elastic_simulations.benchmarks import one_device
from fl_elastic_simulations.benchmarks.one_device import METHODS, one_device_cell
from fl_elastic_simulations.data.datasets import data_root_folder

BY_NAME = {each.name: each for each in METHODS}
_WEIGHTS = data_root_folder(None) / one_device._WEIGHTS


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
