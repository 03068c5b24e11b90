"""What the benchmark of one device does with a few examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic_simulations.benchmarks.benchmark import Request, markdown
from fl_elastic_simulations.benchmarks.one_device import BENCHMARK, METHODS, one_device_cell
from fl_elastic_simulations.data.datasets import data_root_folder

_WEIGHTS = data_root_folder(None) / "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"


def test_a_row_of_other_images_pairs_the_seeds_that_both_have() -> None:
    def cell(accuracy: float, seconds: float, reads: str = "") -> dict[str, object]:
        return {"accuracy": accuracy, "seconds": seconds, "reads": reads}

    rows = {
        "signs | full | 0.0003 | 0": cell(0.9, 100.0),
        "signs | full | 0.0003 | 1": cell(0.8, 200.0),
        "signs | chosen places | 0.0003 | 0": cell(0.95, 10.0, "a@grid4"),
        "signs | chosen places | 0.0003 | 1": cell(0.87, 10.0, "b@grid4"),
        "signs | solved head | 0.0003 | 0": cell(0.4, 4.0),
        "signs | solved head | 0.0003 | 2": cell(0.9, 4.0),
    }
    title = "traffic signs at 64 pixels"
    lines = markdown(BENCHMARK.tables(rows)["elsewhere"]).splitlines()
    assert lines[2:] == [
        f"| {title} | full | 2 | 85.0 | +0.0 | 1.000 | last layer |",
        f"| {title} | solved head | 1 | 40.0 | -50.0 | 0.040 | last layer |",
        f"| {title} | chosen places | 2 | 91.0 | +6.0 | 0.075 | a@grid4; b@grid4 |",
    ]


def test_other_seeds_take_the_best_rate_of_the_first(tmp_path: Path) -> None:
    request = Request(tmp_path, tasks=["birds"], methods=["full", "solved head"])
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
    row = one_device_cell("birds", name, 3e-4, 0, str(data_root_folder(None)), examples=48)
    method = METHODS[name]
    assert row["steps"] == 3 * method.epochs and row["accuracy"] > 0.02
    if method.cut:
        # The pass for sums left them all.
        assert row["features_found"] == 96
