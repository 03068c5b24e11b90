"""What the benchmark of one device does with a few examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic_simulations.benchmarks.benchmark import Request
from fl_elastic_simulations.benchmarks.one_device import BENCHMARK, METHODS, one_device_cell
from fl_elastic_simulations.data.datasets import data_root_folder

_WEIGHTS = data_root_folder(None) / "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"


def test_other_seeds_take_the_best_rate_of_the_first(tmp_path: Path) -> None:
    request = Request(tmp_path, methods=["full", "solved head"])
    first = BENCHMARK.cases(request, {})
    assert list(first) == [
        "birds | full | 0.001 | 0", "birds | full | 0.0003 | 0", "birds | solved head | 0.001 | 0",
    ]  # fmt: skip
    rows = {key: {"accuracy": 0.5} for key in first} | {
        "birds | full | 0.0003 | 0": {"accuracy": 0.6}
    }
    later = set(BENCHMARK.cases(request, rows)) - set(first)
    assert later == {
        f"birds | {method} | {seed}"
        for method in ("full | 0.0003", "solved head | 0.001")
        for seed in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.skipif(not _WEIGHTS.exists(), reason="needs the pretrained weights")
@pytest.mark.parametrize(
    "name", ["solved head", "full, 2 epochs", "solved head, block 14, 2 epochs"]
)
def test_a_cell_trains_what_it_says(name: str) -> None:
    row = one_device_cell(name, 3e-4, 0, str(data_root_folder(None)), examples=48)
    epochs, method = METHODS[name]
    assert row["steps"] == 3 * epochs and row["accuracy"] > 0.02
    if method.cut:
        # The pass for sums left them all.
        assert row["features_found"] == 96
