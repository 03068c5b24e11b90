"""On one device, too, a small bound of features projects places instead of choosing narrow ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.errors import PlanError, SettingError
from fl_elastic.flower import RoundConfig
from fl_elastic.readout.best_reading import choose_reading
from fl_elastic.readout.place import AUTO, Reading
from fl_elastic.readout.projection import Directions
from fl_elastic.readout.readout_module import Readout
from fl_elastic.training.place_sample import place_sample
from fl_elastic.training.read_out import read_out


def stripes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class is the column of a stripe, which a mean over the image does not show."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 1, 8, 8, generator=draw)
    labels = torch.arange(count) % 4
    for image, label in zip(images, labels, strict=True):
        image[0, :, 2 * label] += 1.0
    return images, labels


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(8, 4)).eval()


def test_a_small_bound_projects_the_places_that_are_best_of_any_width() -> None:
    x, y = stripes(320, 0)
    data = list(zip(x.split(32), y.split(32), strict=True))
    found = read_out(network(), data, read="auto>12")
    assert isinstance(found.model, Readout) and found.choice is not None
    assert found.choice.best.features > 12 == found.model.head.in_features
    tests, labels = stripes(200, 1)
    right = float((found.model(tests).argmax(1) == labels).float().mean())
    narrow = read_out(network(), data, read="last").model
    assert right > 0.9 > float((narrow(tests).argmax(1) == labels).float().mean())
    # Its numbers are the directions of those places' features, by hand.
    places = found.choice.best.places
    sample = place_sample(network(), data, Reading(places), examples=640, most_features=2560).sample
    rows = [sample.rows[place] for place in places]
    directions = Directions.of(rows, sample.constant, 12)
    plain = Readout(network(), places, x, 4)
    plain.head = nn.Identity()  # type: ignore[assignment]
    scaled = plain(tests).detach().double().numpy() * np.exp2(directions.exponents.astype(float))
    expected = scaled @ (directions.matrix.astype(float) / 127).T
    head, found.model.head = found.model.head, nn.Identity()  # type: ignore[assignment]
    np.testing.assert_allclose(found.model(tests).detach().numpy(), expected, rtol=1e-3, atol=1e-3)
    assert head.weight.shape == (4, 12)


def test_named_places_are_projected_as_their_name_says() -> None:
    x, y = stripes(96, 0)
    data = [(x, y)]
    model = read_out(network(), data, read="1@grid4>6").model
    assert isinstance(model, Readout) and str(model.reading) == "1@grid4>6"
    assert model.projection is not None and bool((model.projection.matrix != 0).any())


@pytest.mark.parametrize("read", ["auto>0", "auto>x", "auto>", "auto>-3"])
def test_a_bound_that_means_nothing_is_refused_as_it_was_given(read: str) -> None:
    x, y = stripes(8, 0)
    with pytest.raises(PlanError, match=f"'{read}' has no number of features"):
        read_out(network(), [(x, y)], read=read)
    with pytest.raises(SettingError, match=f"'{read}' has no number of features"):
        RoundConfig(read=read)


def test_as_many_as_are_allowed_are_read_as_they_are() -> None:
    x, y = stripes(96, 0)
    sample = place_sample(network(), [(x, y)], examples=640, most_features=2560).sample
    chosen = choose_reading(sample, AUTO, most_features=2560)
    assert chosen.directions is None and chosen.reading.width == 0
