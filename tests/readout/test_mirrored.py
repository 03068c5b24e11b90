"""Features that are means over each image and its mirror image, against two passes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from readouts import hooked_features, of_zoo
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.readout.place import INPUT, Reading, parse_places
from fl_elastic.readout.readout_module import Readout
from fl_elastic.training.place_sample import place_sample
from fl_elastic.training.read_out import read_out


def by_hand(model: nn.Module, places: str, inputs: Any) -> Tensor:
    turned = (
        {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
        if isinstance(inputs, dict)
        else inputs.flip(-1)
    )
    one, other = (hooked_features(model, parse_places(places), each) for each in (inputs, turned))
    return (one + other) / 2


def features_of(readout: Readout, inputs: Any) -> Tensor:
    seen: list[Tensor] = []
    with readout.head.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        readout(**inputs) if isinstance(inputs, dict) else readout(inputs)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("resnet18", "layer1@grid2+layer3@grid1"),
        ("mobilenet_v3_small", "features.4@grid2"),
        ("vision_transformer", "encoder.layers.encoder_layer_0@tokens1"),
    ],
)
def test_features_are_those_of_two_passes(name: str, places: str) -> None:
    model, inputs = of_zoo("vision_models", name)
    readout = Readout(model, f"mirrored:{places}", inputs, 3).eval()
    expected = by_hand(model, places, inputs)
    torch.testing.assert_close(features_of(readout, inputs), expected, rtol=1e-4, atol=1e-5)
    turned = features_of(readout, inputs.flip(-1))
    torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-5)
    reading = Reading.parse(f"mirrored:{places}")
    loader = [(inputs, torch.arange(len(inputs)) % 2)]
    sample = place_sample(model, loader, reading, examples=len(inputs), most_features=9999).sample
    rows = torch.cat([torch.from_numpy(sample.rows[place]) for place in reading.places], dim=1)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


class Named(nn.Module):
    """Takes images by name, and a number per example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor, size: Tensor) -> Tensor:
        return self.head(self.conv(pixel_values).mean((2, 3)) + size)  # type: ignore[no-any-return]


def test_images_among_other_inputs_are_mirrored() -> None:
    model, inputs = Named(), {"pixel_values": torch.randn(5, 3, 8, 8), "size": torch.randn(5, 1)}
    readout = Readout(model, "mirrored:conv@grid2+in:head@flat", inputs, 2).eval()
    torch.testing.assert_close(
        features_of(readout, inputs), by_hand(model, "conv@grid2+in:head@flat", inputs)
    )


def spots(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """The class says in which half, upper or lower, a spot is; its column is the example's own."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 2, (examples,), generator=generator)
    images = torch.randn(examples, 1, 8, 8, generator=generator)
    columns = torch.randint(0, 8, (examples,), generator=generator).tolist()
    for image, label, column in zip(images, classes.tolist(), columns, strict=True):
        image[0, 4 * label : 4 * label + 4, column] += 3.0
    return images, classes


def test_places_are_chosen_by_both_views_and_classes_without_left_and_right_gain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )  # fmt: skip
    x, y = spots(100, 0)
    tests, labels = spots(600, 1)

    def right(read: str) -> float:
        found = read_out(model, [(x, y)], read=read)
        assert isinstance(found.model, Readout)
        assert found.model.reading.mirrored == read.startswith("mirrored:")
        return float((found.model.eval()(tests).argmax(1) == labels).float().mean())

    plain, both = right("input@flat"), right("mirrored:input@flat")
    assert both > plain + 0.03, (plain, both)
    assert right("mirrored:auto") > plain


def test_the_input_of_the_last_layer_is_read_by_both_views() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 2)).eval()
    x, y = spots(40, 0)
    found = read_out(model, [(x, y)], read="mirrored:in:3@flat").model
    torch.testing.assert_close(found(x), found(x.flip(-1)))


@pytest.mark.parametrize("read", ["mirrored:auto", f"mirrored:{INPUT}@flat"])
def test_what_is_no_image_is_refused(read: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(PlanError, match="needs images"):
        read_out(model, [(torch.randn(8, 6), torch.arange(8) % 2)], read=read)
