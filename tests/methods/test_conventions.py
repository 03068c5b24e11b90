"""Published cost figures, reproduced from the shapes of the published models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.sparse_update.published_schemes import (
    PUBLISHED_MODELS,
    LayerUpdate,
    PublishedModel,
    Scheme,
)
from fl_elastic.profiling.layer_shapes import LayerShape, group_layers

MODELS = {model.name: model for model in PUBLISHED_MODELS}
SCHEMES = [(m.name, scheme) for m in PUBLISHED_MODELS for scheme in m.schemes]
MIB = 2**20


def share(channels: int, fraction: float) -> int:
    """Channels that are trained."""
    return max(1, int(channels * fraction)) if fraction else 0


def trained_weights(layer: LayerShape, fraction: float) -> int:
    channels = layer.out_channels if layer.is_depthwise else layer.in_channels
    return layer.weights // channels * share(channels, fraction)


def tiny_training_bits(layers: Sequence[LayerShape], updates: Sequence[LayerUpdate]) -> int:
    """Extra memory in bits by the rule of tiny-training (Lin et al., NeurIPS 2022).

    It counts one bit per output of every convolution whose bias is trained, and 32 bits per such bias; 8 bits per
    kept input and per trained weight; and 8 bits per input of the classifier, whose own weights are not counted.
    The published labels are this number over 8 x 1024, rounded down.
    """
    bits = 8 * layers[-1].out_channels
    for layer, update in zip(layers, updates, strict=True):
        if update.bias:
            bits += layer.out_channels * math.prod(layer.out_size) + 32 * layer.out_channels
        kept = share(layer.in_channels, update.fraction) * math.prod(layer.in_size)
        bits += 8 * (kept + trained_weights(layer, update.fraction))
    return bits


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
    bits = tiny_training_bits(model.layers, updates)
    assert bits // 8 // 1024 == scheme.kilobytes


@pytest.mark.parametrize(
    ("name", "kilobytes"), [("mbv2-w0.35", 1306), ("mcunet-5fps", 1400), ("proxyless-w0.3", 1211)]
)
def test_the_size_of_a_full_update(name: str, kilobytes: int) -> None:
    model = MODELS[name]
    everything = [LayerUpdate(1.0, bias=True)] * len(model.layers)
    bits = tiny_training_bits(model.layers, everything)
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
        parameters = sum(
            trained_weights(la, u.fraction) + 4 * la.out_channels * u.bias for la, u in pairs
        )
        total = tiny_training_bits(model.layers, updates) / 8
        assert parameters / 1024 == pytest.approx(trained, abs=0.06)
        assert (total - parameters) / 1024 == pytest.approx(kept, abs=0.06)


@pytest.mark.parametrize(
    ("name", "millions"), [("mbv2-w0.35", 16.65), ("mcunet-5fps", 22.45), ("proxyless-w0.3", 18.62)]
)
def test_forward_multiply_adds(name: str, millions: float) -> None:
    assert sum(
        la.weights * math.prod(la.out_size) for la in MODELS[name].layers
    ) / 1e6 == pytest.approx(millions, abs=0.005)


def traced(model: nn.Module, shape: tuple[int, ...]) -> BackwardGraph:
    batch = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)
    return trace_step(model, nn.functional.cross_entropy, batch).graph


def test_shapes_of_a_traced_model_are_its_own() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, (3, 1), groups=8), nn.Conv2d(8, 12, 1, groups=4), nn.Flatten(2), nn.Linear(18, 5),
        nn.Flatten(), nn.Linear(60, 4),
    )  # fmt: skip
    found = group_layers(traced(model, (2, 3, 16, 6)), (2, 3, 16, 6))
    assert [*reversed(found.values())] == [
        LayerShape("0", 3, 8, (3, 3), 1, (16, 6), (8, 3)),
        LayerShape("3", 8, 8, (3, 1), 8, (8, 3), (6, 3)),
        LayerShape("4", 8, 12, (1, 1), 4, (6, 3), (6, 3)),
        LayerShape("6", 18, 5, (1, 1), 1, (12, 1), (12, 1)),
        LayerShape("8", 60, 4),
    ]


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
    assert tree["classifier"]["in_channel"] == model.layers[-1].out_channels


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
