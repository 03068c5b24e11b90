"""Which places are looked at: the same on every device, in order, each with one row of numbers for an example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from readouts import ODD, of_zoo
from slow_ones import slow_unless
from torch import nn

from fl_elastic.groups.batch import as_pair
from fl_elastic.readout.candidates import candidate_places
from fl_elastic.readout.place import INPUT, MOST_FEATURES, Place
from fl_elastic.readout.readout_module import Readout
from fl_elastic.testing.probes import Snapshot

ROWS = [
    ("vision_models", "resnet18"), ("vision_models", "mobilenet_v3_small"), ("vision_models", "densenet"),
    ("vision_models", "swin_v2"), ("vision_models", "vision_transformer"), ("language_models", "bert_classifies"),
    ("sensing_models", "convnext_classifies"), ("unusual_models", "sequences_with_time_first"),
    ("unusual_models", "packed_sequences"), ("unusual_models", "graphs_as_objects"),
    ("unusual_models", "bags_of_words"),
]  # fmt: skip
TARGETS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(("module", "name"), slow_unless(lambda *row: row in ROWS[::3], ROWS))
def test_equal_models_have_equal_places_whatever_is_frozen_and_in_which_mode(
    module: str, name: str
) -> None:
    model, inputs = of_zoo(module, name)
    before = Snapshot(model)
    first = candidate_places(model, (inputs, TARGETS))
    assert before.differences() == []
    assert first and len(set(first)) == len(first)
    again = candidate_places(of_zoo(module, name)[0].eval(), (inputs, TARGETS))
    frozen = of_zoo(module, name)[0].requires_grad_(False)
    some = of_zoo(module, name)[0]
    for number, parameter in enumerate(some.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    with torch.no_grad():
        assert candidate_places(some, (inputs, TARGETS)) == first
    assert again == first
    assert candidate_places(frozen, (inputs, TARGETS)) == first
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.parametrize(("module", "name"), slow_unless(lambda *row: row in ROWS[:2], ROWS[:5]))
def test_the_size_of_a_batch_makes_no_difference(module: str, name: str) -> None:
    model, inputs = of_zoo(module, name)
    first = candidate_places(model, (inputs, TARGETS))
    for count in (2, 9):
        more = inputs.repeat(3, 1, 1, 1)[:count]
        assert candidate_places(model, (more, torch.zeros(count, dtype=torch.long))) == first


@pytest.mark.parametrize("name", ODD)
def test_every_candidate_can_be_read(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ODD[name][0]()
    places = candidate_places(model, (inputs, TARGETS))
    assert places
    for place in places:
        readout = Readout(model, (place,), inputs, 3)
        assert 0 < readout.head.in_features <= MOST_FEATURES


@pytest.mark.parametrize("most", slow_unless((8).__eq__, [1, 8, 100, 5000]))
def test_places_with_more_features_are_left_out(most: int) -> None:
    model, inputs = of_zoo("vision_models", "resnet18")
    for place in candidate_places(model, (inputs, TARGETS), most):
        assert Readout(model, (place,), inputs, 3).head.in_features <= most


def test_a_name_with_a_plus_in_it_is_no_place() -> None:
    model = nn.Sequential()
    model.add_module("a+b", nn.Linear(6, 5))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(5, 3))
    places = candidate_places(model, (torch.randn(4, 6), TARGETS))
    assert Place("head", "flat", at_input=True) in places
    assert not any("+" in place.module for place in places)


def test_inputs_that_are_objects_are_no_place() -> None:
    model, inputs = of_zoo("unusual_models", "graphs_as_objects")
    places = candidate_places(model, (inputs, TARGETS))
    assert places and not any(place.module == INPUT for place in places)


def test_rows_of_time_steps_or_nodes_are_no_examples() -> None:
    for name in ("graphs_as_objects", "packed_sequences", "sequences_with_time_first"):
        model, inputs = of_zoo("unusual_models", name)
        for place in candidate_places(model, (inputs, TARGETS)):
            readout = Readout(model, (place,), inputs, 3)
            assert len(readout(inputs)) == 4, (name, str(place))


def test_a_batch_of_a_loader_is_taken_as_it_comes() -> None:
    model, inputs = of_zoo("language_models", "bert_classifies")
    batch: Any = {**inputs, "labels": TARGETS}
    assert candidate_places(model, batch) == candidate_places(model, as_pair(batch))


def test_maps_of_volumes_are_read_on_grids_as_those_of_images() -> None:
    layers = [nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 8, 3), nn.AdaptiveAvgPool3d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))
    places = candidate_places(model, (torch.randn(4, 1, 8, 12, 12), TARGETS))
    assert {"input@grid4", "1@grid2", "1@grid4"} <= set(map(str, places))


class MixedPrecision(nn.Module):
    """A body in half precision under a head in single precision."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers).bfloat16()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x.bfloat16()).float())
        return scores


def test_parts_of_a_model_may_differ_in_precision() -> None:
    inputs = torch.randn(8, 3, 10, 10)
    places = candidate_places(MixedPrecision(), (inputs, torch.arange(8) % 3))
    modules = {place.module for place in places}
    # The body's last output is the head's input, in another precision.
    assert modules == {"input", "body.1", "head"}
    assert Readout(MixedPrecision(), places[:2] + places[-2:], inputs, 3)(inputs).shape == (8, 3)
