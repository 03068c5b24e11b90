"""The benchmark of filtered gradients: kinds of layers, plans, medians and what a second is worth."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from small_subject import small_subject
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.planning.importance.fidelity import Fidelity
from fl_elastic_simulations.benchmarks import filter as filter_module
from fl_elastic_simulations.benchmarks.filter import (
    bench_filter,
    choice_row,
    cosine_rows,
    step_row,
    value_per_second,
    with_modes,
)
from fl_elastic_simulations.benchmarks.filter_layers import (
    FILTERED,
    Layer,
    backward_ratios,
    kind_of,
    layers_of,
    median_by_kind,
)
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.subject import Subject


@pytest.fixture(scope="module")
def small() -> Subject:
    return small_subject()


def made_up_fidelity(small: Subject) -> Fidelity:
    shape = (len(small.graph.groups), len(FILTERED))
    cosines = np.full(shape, np.nan)
    for group, known in enumerate(small.graph.groups):
        if known.kind == "conv":
            cosines[group] = [0.8, 0.6, 0.8, 0.6]
    return Fidelity(FILTERED, cosines, cosines / 2)


@pytest.mark.parametrize(
    ("conv", "kind"),
    [
        (nn.Conv2d(4, 8, 3), "dense 3x3"),
        (nn.Conv2d(4, 8, 1), "pointwise"),
        (nn.Conv2d(4, 4, 3, groups=4), "depthwise"),
        (nn.Conv2d(4, 4, 3, groups=4, stride=2), "stride 2"),
        (nn.Conv2d(4, 4, 3, groups=2), "other"),
        (nn.Conv2d(4, 4, 5), "other"),
        (nn.Conv2d(1, 1, 3), "dense 3x3"),
    ],
)
def test_every_layer_has_one_kind(conv: nn.Conv2d, kind: str) -> None:
    assert kind_of(conv) == kind


def test_layers_come_with_the_shape_of_their_input(small: Subject) -> None:
    small.model.train()
    layers = layers_of(small.model, (32, 3, 16, 16))
    assert [(layer.name, layer.inputs) for layer in layers] == [
        ("0.0", (32, 3, 16, 16)),
        ("1.0", (32, 8, 16, 16)),
        ("2.0", (32, 8, 16, 16)),
        ("2.2", (32, 16, 8, 8)),
    ]
    assert small.model.training and not small.model[0][0]._forward_pre_hooks


def test_times_are_over_the_exact_ones() -> None:
    # A clock that goes on by one at each look: forward and backward passes all take the same.
    ticks = itertools.count()
    layer = Layer("a", nn.Conv2d(2, 2, 3, padding=1), (2, 2, 8, 8))
    pixel = Layer("b", nn.Conv2d(2, 2, 1), (2, 2, 1, 1))
    found = backward_ratios([layer, layer, pixel], lambda: float(next(ticks)), repeats=1)
    assert list(found) == [layer.key]
    assert found[layer.key] == {str(mode): (1.0, 1.0) for mode in FILTERED}


def test_medians_count_each_layer() -> None:
    one = Layer("a", nn.Conv2d(2, 2, 1), (2, 2, 8, 8))
    other = Layer("b", nn.Conv2d(2, 4, 1), (2, 2, 8, 8))
    deep = Layer("c", nn.Conv2d(2, 2, 3), (2, 2, 8, 8))
    ratios = {
        one.key: {"w2": (0.5, 0.6)},
        other.key: {"w2": (0.9, 1.0)},
        deep.key: {"w2": (0.2, 0.3)},
    }
    table = median_by_kind([one, one, other, deep], ratios)
    assert table == {
        "dense 3x3": {"layers": 1, "shapes": 1, "backward_w2": 0.2, "whole_w2": 0.3},
        "pointwise": {"layers": 3, "shapes": 2, "backward_w2": 0.5, "whole_w2": 0.6},
    }


def test_plans_filter_the_last_layers_and_train_the_head(small: Subject) -> None:
    full = small.plan("full", Budget())
    names = [group.name for group in small.graph.groups]
    last = [names.index("2.2"), names.index("2.0")]
    plan = with_modes(full, last, small, Mode.parse("wx2"))
    trained = {name: str(mode) for name, mode in zip(names, plan.modes, strict=True)}
    assert {name: mode for name, mode in trained.items() if mode != "frozen"} == {
        "5": "full", "2.2": "wx2", "2.0": "wx2",
    }  # fmt: skip
    row = step_row(small, 2, repeats=1)
    assert (row["convolutions"], row["filtered"]) == (2, 2)
    assert all(row[f"{mode}_over_exact"] > 0 for mode in FILTERED)
    assert step_row(small, None, repeats=1)["convolutions"] == 4


def test_cosines_are_medians_by_kind(small: Subject) -> None:
    table = cosine_rows(small, made_up_fidelity(small))
    assert set(table) == {"dense 3x3", "pointwise", "depthwise", "stride 2"}
    row = table["depthwise"]
    assert (row["layers"], row["weight_w2"], row["weight_wx4"]) == (1, 0.8, 0.6)
    assert row["input_wx2"] == pytest.approx(0.4) and "input_w2" not in row


def test_value_per_second_is_what_is_kept_over_the_time() -> None:
    worth = value_per_second(np.array([0.8, np.nan]), np.array([0.32, 1.0]))
    assert worth[0] == pytest.approx(2.0) and math.isnan(worth[1])


def test_the_choice_names_its_reasons(small: Subject) -> None:
    row = choice_row(small, made_up_fidelity(small), 2.0)
    assert row["layers"] == 4
    assert row["kept_w2"] == pytest.approx(0.64) and row["path_kept_wx2"] == pytest.approx(0.16)
    assert 0 <= row["layers_above_1_w2"] <= 4
    assert "full" in row["chosen"]
    json.dumps(row)


def test_rows_at_hand_are_not_measured_again(
    small: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_module, "MODELS", ("small",))
    monkeypatch.setattr(filter_module, "PIXELS", (16,))
    monkeypatch.setattr(filter_module, "SPEEDUPS", (1.5,))
    asked = []

    def layer_rows(model: str, pixels: int) -> dict[str, dict[str, float]]:
        asked.append("layers")
        return {"pointwise": {"layers": 1}}

    def the_subject(*_: object) -> tuple[Subject, str]:
        asked.append("subject")
        return small, "random"

    monkeypatch.setattr(filter_module, "layer_rows", layer_rows)
    monkeypatch.setattr(filter_module, "_subject", the_subject)
    path = tmp_path / "filter.json"
    bench_filter(Results(path))
    rows = Results(path).rows
    assert "choice | small at 16 | 1.5" in rows
    assert rows["cosine | small at 16 | depthwise"]["data"] == "random"
    assert rows["layers | small at 16 | pointwise"] == {"layers": 1}
    bench_filter(Results(path))
    assert asked == ["layers", "subject"]
