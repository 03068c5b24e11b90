"""Published cost figures, reproduced from the shapes of the published models."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.sparse_update.conventions import (
    LayerUpdate,
    legacy_costs,
    tiny_training_bits,
    tinytrain_bytes,
    tinytrain_full_macs,
    tinytrain_macs,
)
from fl_elastic.methods.sparse_update.published_schemes import (
    PUBLISHED_MODELS,
    PublishedModel,
    Scheme,
)
from fl_elastic.profiling.layer_shapes import LayerShape, layer_shapes

MODELS = {model.name: model for model in PUBLISHED_MODELS}
SCHEMES = [(m.name, scheme) for m in PUBLISHED_MODELS for scheme in m.schemes]
MIB = 2**20


def mixed(name: str) -> tuple[LayerShape, ...]:
    """The layers of a model with the last convolution that the shipped one lacks."""
    last = {"mbv2-w0.35": (112, 448), "proxyless-w0.3": (96, 384)}[name]
    return *MODELS[name].layers, LayerShape("mix", *last, in_size=(4, 4), out_size=(4, 4))


def last_alone(layers: tuple[LayerShape, ...]) -> list[LayerUpdate]:
    return [LayerUpdate()] * (len(layers) - 1) + [LayerUpdate(1.0)]


def test_there_are_fifteen_schemes_of_three_models() -> None:
    assert len(SCHEMES) == 15
    assert {name: len(m.layers) for name, m in MODELS.items()} == {
        "mbv2-w0.35": 51, "mcunet-5fps": 42, "proxyless-w0.3": 60,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "scheme"), SCHEMES, ids=lambda v: getattr(v, "kilobytes", v))
def test_the_size_of_each_scheme_is_its_label(name: str, scheme: Scheme) -> None:
    model = MODELS[name]
    updates = scheme.updates(len(model.layers))
    bits = tiny_training_bits(model.layers, updates, model.classifier_inputs)
    assert bits // 8 // 1024 == scheme.kilobytes


@pytest.mark.parametrize(
    ("name", "kilobytes"), [("mbv2-w0.35", 1306), ("mcunet-5fps", 1400), ("proxyless-w0.3", 1211)]
)
def test_the_size_of_a_full_update(name: str, kilobytes: int) -> None:
    model = MODELS[name]
    everything = [LayerUpdate(1.0, bias=True)] * len(model.layers)
    bits = tiny_training_bits(model.layers, everything, model.classifier_inputs)
    assert round(bits / 8 / 1024) == kilobytes


def test_parts_of_two_schemes_are_as_computed() -> None:
    # Saved activations and masks, then weights and biases, in kB.
    for name, index, kept, trained in (
        ("mbv2-w0.35", 0, 15.7, 34.1),
        ("mcunet-5fps", 2, 29.9, 70.0),
    ):
        model = MODELS[name]
        updates = model.schemes[index].updates(len(model.layers))
        pairs = list(zip(model.layers, updates, strict=True))
        parameters = sum(u.weights(la) + 4 * la.out_channels * u.bias for la, u in pairs)
        total = tiny_training_bits(model.layers, updates, model.classifier_inputs) / 8
        assert parameters / 1024 == pytest.approx(trained, abs=0.06)
        assert (total - parameters) / 1024 == pytest.approx(kept, abs=0.06)


@pytest.mark.parametrize(
    ("name", "millions"), [("mbv2-w0.35", 16.65), ("mcunet-5fps", 22.45), ("proxyless-w0.3", 18.62)]
)
def test_forward_multiply_adds(name: str, millions: float) -> None:
    assert sum(la.macs for la in MODELS[name].layers) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    ("layers", "mebibytes", "millions"),
    [
        (mixed("mbv2-w0.35"), 1.64, 0.80),
        (MODELS["mcunet-5fps"].layers, 2.03, 1.47),
        (mixed("proxyless-w0.3"), 1.06, 0.59),
    ],
    ids=list(MODELS),
)
def test_training_the_last_layer(
    layers: tuple[LayerShape, ...], mebibytes: float, millions: float
) -> None:
    updates = last_alone(layers)
    assert round(tinytrain_bytes(layers, updates) / MIB, 2) == mebibytes
    assert round(tinytrain_macs(layers, updates) / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("layers", "millions"),
    [
        (MODELS["mcunet-5fps"].layers, 44.9),
        (mixed("mbv2-w0.35"), 34.9),
        (mixed("proxyless-w0.3"), 38.4),
    ],
    ids=["mcunet", "mbv2", "proxyless"],
)
def test_training_everything(layers: tuple[LayerShape, ...], millions: float) -> None:
    assert round(tinytrain_full_macs(layers) / 1e6, 1) == millions


def test_sparse_update_of_mcunet_in_tinytrains_table() -> None:
    model = MODELS["mcunet-5fps"]
    updates = model.schemes[2].updates(len(model.layers))
    weights = sum(u.weights(la) for la, u in zip(model.layers, updates, strict=True))
    assert model.schemes[2].kilobytes == 99 and weights == 52_480
    assert round(tinytrain_bytes(model.layers, updates) / MIB, 2) == 1.43
    assert round(tinytrain_macs(model.layers, updates) / 1e6, 2) == 11.88


def test_nothing_trained_costs_the_forward_peak_and_the_classifiers_input() -> None:
    model = MODELS["proxyless-w0.3"]
    nothing = [LayerUpdate()] * len(model.layers)
    assert tinytrain_macs(model.layers, nothing) == 0
    assert tinytrain_bytes(model.layers, nothing) == 0.5 * MIB
    assert tiny_training_bits(model.layers, nothing, 96) == 8 * 96


def test_output_channels_save_weights_but_no_input() -> None:
    dense = LayerShape("dense", 12, 20, (3, 3), 1, (8, 8), (4, 4))
    depthwise = LayerShape("depthwise", 12, 12, (5, 5), 12, (8, 8), (8, 8))
    quarter, by_output = LayerUpdate(0.25), LayerUpdate(0.25, axis="out")
    assert (quarter.weights(dense), quarter.inputs(dense)) == (20 * 3 * 9, 3)
    assert (by_output.weights(dense), by_output.inputs(dense)) == (5 * 12 * 9, 12)
    for update in (quarter, by_output):
        assert (update.weights(depthwise), update.inputs(depthwise)) == (3 * 25, 3)
    assert LayerUpdate(bias=True).weights(dense) == LayerUpdate(bias=True).inputs(dense) == 0


def traced(model: nn.Module, shape: tuple[int, ...]) -> BackwardGraph:
    batch = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)
    return trace_step(model, nn.functional.cross_entropy, batch).graph


def test_shapes_of_a_traced_model_are_its_own() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, (3, 1), groups=8), nn.Conv2d(8, 12, 1, groups=4), nn.Flatten(2), nn.Linear(18, 5),
        nn.Flatten(), nn.Linear(60, 4),
    )  # fmt: skip
    found = layer_shapes(traced(model, (2, 3, 16, 6)), (2, 3, 16, 6))
    assert found == [
        LayerShape("0", 3, 8, (3, 3), 1, (16, 6), (8, 3)),
        LayerShape("3", 8, 8, (3, 1), 8, (8, 3), (6, 3)),
        LayerShape("4", 8, 12, (1, 1), 4, (6, 3), (6, 3)),
        LayerShape("6", 18, 5, (1, 1), 1, (12, 1), (12, 1)),
        LayerShape("8", 60, 4),
    ]


def test_costs_of_a_plan_count_norms_as_biases_and_the_classifier_by_its_input() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    graph = traced(model, (2, 3, 6, 6))
    assert [group.name for group in graph.groups] == ["7", "3", "1", "0"]
    modes = [Mode.FULL, Mode.channels(1 / 2), Mode.FULL, Mode.FROZEN]
    costs = legacy_costs(graph, modes, (2, 3, 6, 6))
    bits = 8 * 8 + (8 * 36 + 32 * 8) + 8 * (2 * 36 + 16) + (4 * 36 + 32 * 4)
    assert costs.tiny_training_bytes == bits / 8
    # The largest working set is that of the second convolution: 4 + 8 channels of 6 x 6.
    assert costs.tinytrain_bytes == 4 * 12 * 36 + 16 * (16 + 24)
    assert costs.tinytrain_macs == 24 + (16 * 36 + 24)
    only_head = legacy_costs(graph, [Mode.FULL] + [Mode.FROZEN] * 3, (2, 3, 6, 6))
    assert only_head.tiny_training_bytes == 8 and only_head.tinytrain_macs == 24
    bias = legacy_costs(graph, [Mode.FULL, Mode.BIAS, Mode.FROZEN, Mode.FROZEN], (2, 3, 6, 6))
    assert bias.tinytrain_macs == 24 and bias.tiny_training_bytes == 8 + (8 * 36 + 32 * 8) / 8


@pytest.mark.parametrize("name", list(MODELS))
def test_the_shipped_tables_are_those_of_the_published_files(name: str) -> None:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    root = Path(os.environ.get("FL_ELASTIC_DATA_ROOT") or beside)
    path = root / "weights" / f"tinytraining_int8_{name}.npz"
    if not path.is_file():
        pytest.skip(f"no published weights: {path} is absent; set FL_ELASTIC_DATA_ROOT")
    with np.load(path, allow_pickle=False) as arrays:
        tree = json.loads(arrays["__meta__"].tobytes())
        convolutions = list(convolutions_of(tree, dict(arrays)))
    model: PublishedModel = MODELS[name]
    assert [convolution[:-1] for convolution in convolutions] == [
        (la.in_channels, la.out_channels, la.kernel, la.groups, la.in_size, la.out_size)
        for la in model.layers
    ]
    assert [weights for *_, weights in convolutions] == [la.weights for la in model.layers]
    assert tree["classifier"]["in_channel"] == model.classifier_inputs


def convolutions_of(tree: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Shape of each convolution, from the input, and the size of its stored weight."""
    parts = [tree["first_conv"]]
    for block in tree["blocks"]:
        parts += [block[key] for key in ("pointwise1", "depthwise", "pointwise2")]
    for part in [*parts, tree["feature_mix"]]:
        if part:
            weight = arrays[part["params"]["weight"]["@"]]
            yield (
                part["in_channel"], part["out_channel"], tuple(part["kernel_size"]), part["groups"],
                (part["in_shape"],) * 2, (part["out_shape"],) * 2, math.prod(weight.shape),
            )  # fmt: skip
