"""Projections onto principal directions, against numpy's singular vectors, and as a part of a readout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.readout.loading import loaded
from fl_elastic.readout.place import Place, Reading
from fl_elastic.readout.projection import Directions, Projection
from fl_elastic.readout.readout_module import Readout
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role


def filled(directions: Directions) -> Projection:
    width, features = directions.matrix.shape
    made = Projection(features, width)
    made.exponents.copy_(torch.from_numpy(directions.exponents))
    made.matrix.copy_(torch.from_numpy(directions.matrix))
    return made


@pytest.mark.parametrize("seed", range(5))
def test_it_spans_the_principal_directions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(60, 6)) * [9, 7, 5, 0.1, 0.1, 0.1] @ rng.normal(size=(6, 40))
    units = 10.0 ** rng.uniform(-6, 6, 40)
    rows = (rows + rng.normal(size=40) * 100) * units
    found = Directions.of([rows[:, :25], rows[:, 25:]], np.ones(60), 3)
    scaled = (rows - rows.mean(axis=0)) * np.exp2(found.exponents.astype(float))
    assert ((0.7 < scaled.std(axis=0)) & (scaled.std(axis=0) < 1.5)).all()
    expected = np.linalg.svd(scaled, full_matrices=False)[2][:3]
    matrix = found.matrix.astype(float)
    inside = matrix @ expected.T @ expected
    assert np.abs(inside - matrix).max() < 0.05 * np.abs(matrix).max()
    # Turned: no direction has all of the variance of the first.
    spread = (scaled @ matrix.T).std(axis=0)
    assert spread.max() < 10 * spread.min()


def test_a_rotation_of_the_examples_gives_the_same_span() -> None:
    rng = np.random.default_rng(0)
    rows, turn = rng.normal(size=(30, 12)) + 2.0, np.linalg.qr(rng.normal(size=(30, 30)))[0]
    one = Directions.of([rows], np.ones(30), 5).matrix.astype(float)
    other = Directions.of([turn @ rows], turn @ np.ones(30), 5).matrix.astype(float)
    cosines = np.linalg.svd(np.linalg.qr(one.T)[0].T @ np.linalg.qr(other.T)[0])[1]
    assert cosines.min() > 0.999


def test_what_does_not_vary_is_not_read() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 4))
    rows[:, 2] = 7.0
    found = Directions.of([rows], np.ones(20), 9)
    assert found.matrix.shape == (3, 4)
    made = filled(found)
    changed = torch.from_numpy(rows).float()
    before = made(changed)
    changed[:, 2] += 100.0
    torch.testing.assert_close(made(changed), before, atol=1e-4, rtol=0)


def test_a_readout_with_a_projection_comes_back_from_its_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    images = torch.randn(20, 1, 8, 8)
    readout = Readout(model, "1@grid4>7", images, 3)
    assert readout.head.in_features == 7
    features = model[:2](images)
    rows = nn.functional.adaptive_avg_pool2d(features, 4).flatten(1).detach().numpy()
    directions = Directions.of([rows], np.ones(20), 7)
    assert readout.projection is not None
    readout.projection.load_state_dict(filled(directions).state_dict())
    nn.init.normal_(readout.head.weight)
    back = loaded(model, readout.state_dict(), images)
    assert isinstance(back, Readout) and str(back.reading) == "1@grid4>7"
    assert torch.equal(back(images), readout(images)) and back(images).std() > 0
    manifest = Manifest.of(readout)
    roles = {name: manifest.role(name) for name in manifest.names if "projection" in name}
    assert set(roles.values()) == {Role.COUNTER} and len(roles) == 2


def test_it_travels_with_a_frozen_body() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model.requires_grad_(False)
    readout = Readout(model, "1@grid4>7", torch.randn(2, 1, 8, 8), 3)
    names = Manifest.of(readout).names
    assert names == (
        "read_from",
        "projection.exponents",
        "projection.matrix",
        "head.weight",
        "head.bias",
    )


def test_names_of_readings() -> None:
    reading = Reading.parse("input@flat+in:4@flat>12")
    assert reading == Reading((Place.parse("input@flat"), Place.parse("in:4@flat")), 12)
    # Modules of a graph are named by what they lead from and to.
    for width in (0, 7):
        led = Reading((Place.parse("sees>is_seen@flat"), Place.parse("in:a>b@grid2")), width)
        assert Reading.parse(str(led)) == led
    for wrong in (
        "1@flat>",
        "1@flat>0",
        "1@flat>x",
        "1@flat>-3",
        ">4",
        "1@flat>4>5",
        "1@flat>9999999",
        "auto>",
        "mirrored:",
        "mirrored:>4",
        "mirrored:mirrored",
    ):
        with pytest.raises(PlanError):
            Reading.parse(wrong)
