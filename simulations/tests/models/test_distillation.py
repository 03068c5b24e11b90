"""Backbones distilled from pooled features: the features, the targets, and a training that survives a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.errors import DatasetError, ModelError, TrainingError
from fl_elastic_simulations.models.distillation import Distilled, Recipe, distil
from fl_elastic_simulations.models.pooled_features import find_features, pooled_features
from fl_elastic_simulations.models.projection import Projection, power_temperature


class Residual(nn.Module):
    """Ends in a functional ReLU of a sum, a functional pooling, a dropout and a linear layer."""

    def __init__(self, width: int, *, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace)
        )
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, 5)
        self.inplace = inplace

    def before(self, x: Tensor) -> Tensor:
        """What the last ReLU takes, written out."""
        y: Tensor = self.stem(x)
        return y + self.inner(y)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.before(x), inplace=self.inplace)
        out: Tensor = self.head(
            self.dropout(torch.flatten(functional.adaptive_avg_pool2d(y, 1), 1))
        )
        return out


def residual(width: int, seed: int = 0, **options: bool) -> Residual:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Residual(width, **options)


def pictures(count: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    drawn = np.random.default_rng(seed).normal(size=(count, 3, 6, 6))
    return drawn.astype(np.float32)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_features_are_those_before_the_last_relu(inplace: bool, training: bool) -> None:
    model, x = residual(8, inplace=inplace), torch.from_numpy(pictures(4))
    place = find_features(model.train(training), x)
    assert model.training is training and model.stem[1].num_batches_tracked == 0
    assert (place.width, place.head) == (8, ("head.weight", "head.bias"))
    found = pooled_features(model.eval(), place, x)
    before = model.before(x)
    expected = before.mean((2, 3))
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, functional.relu(before).mean((2, 3)), atol=1e-3)
    weight = model.inner[0].weight
    gradients = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (found, expected)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)
    # Dropout, which stands behind the pooling, does not touch them.
    model.train().stem[1].eval()
    model.inner[1].eval()
    assert torch.equal(pooled_features(model, place, x), pooled_features(model, place, x))


def test_a_pooling_behind_relu_and_maxima_is_found() -> None:
    body = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model, x = nn.Sequential(body, nn.Linear(6, 2)), torch.from_numpy(pictures(2))
    found = pooled_features(model, find_features(model, x), x)
    assert torch.allclose(found, functional.max_pool2d(body[0](x), 2).mean((2, 3)), atol=1e-6)


def test_without_a_relu_features_are_as_pooled() -> None:
    first, second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1)
    body = nn.Sequential(first, nn.ReLU(), second, nn.SiLU(), nn.AvgPool2d(4), nn.Flatten())
    model, x = nn.Sequential(body, nn.Linear(6, 2)), torch.from_numpy(pictures(2))
    place = find_features(model, x)
    assert place.relu is None
    assert torch.equal(pooled_features(model, place, x), body(x))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), "not from a linear layer"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 2)), "'its input' stands between"),
        (
            lambda: nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
            ),
            "'relu' stands between",
        ),
        (
            lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(3), nn.Linear(3, 2)),
            "'layer_norm' stands between",
        ),
        (lambda: nn.Conv2d(3, 4, 3), "not from a linear layer"),
    ],
    ids=["no linear", "no pooling", "hidden layer", "norm", "convolution"],
)  # fmt: skip
def test_models_without_such_features_are_told_why(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        find_features(make(), torch.from_numpy(pictures(2)))


def test_features_need_the_pass_in_which_they_were_found() -> None:
    place = find_features(residual(8), torch.from_numpy(pictures(2)))
    with pytest.raises(ModelError, match="differs"):
        pooled_features(residual(4), place, torch.from_numpy(pictures(2)))


def test_directions_are_those_of_the_singular_value_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 9, generator=generator) @ torch.randn(9, 9, generator=generator) + 3
    found = Projection.of(features, 4)
    assert torch.allclose(found.directions.T @ found.directions, torch.eye(4), atol=1e-6)
    centred = (features - features.mean(0)).double()
    expected = torch.linalg.svd(centred, full_matrices=False).Vh[:4].T.float()
    signs = (expected * found.directions).sum(0)
    assert torch.allclose(signs.abs(), torch.ones(4), atol=1e-4)
    assert torch.allclose(
        found.of_features(features), centred.float() @ (expected * signs.sign()), atol=1e-4
    )
    assert (found.directions.gather(0, found.directions.abs().argmax(0)[None]) > 0).all()


def test_more_directions_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="narrower student"):
        Projection.of(torch.zeros(9, 3), 4)
    with pytest.raises(ModelError, match="give at least 4"):
        Projection.of(torch.zeros(3, 9), 4)


@given(
    values=st.lists(
        st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=20, unique=True
    ),
    temperature=st.floats(0.01, 10),
    power=st.floats(1, 5),
)
def test_power_temperature_is_odd_and_monotone(
    values: list[float], temperature: float, power: float
) -> None:
    x = torch.tensor(sorted(values), dtype=torch.float64)
    found = power_temperature(x, temperature, power)
    assert torch.equal(power_temperature(-x, temperature, power), -found)
    assert (found.diff() >= 0).all() and torch.equal(found.sign(), x.sign())
    assert torch.allclose(found.abs().pow(power) * temperature, x.abs(), rtol=1e-9)


RECIPE = Recipe(epochs=4, batch_size=16)


def run(
    folder: Path, recipe: Recipe = RECIPE, tell: Callable[[str], None] = lambda _: None
) -> tuple[Residual, Distilled]:
    student = residual(6, seed=1)
    return student, distil(student, residual(12), pictures(600), recipe, folder, tell)


class Killed(BaseException):
    """What no handler of errors catches."""


@pytest.mark.parametrize("last", ["teacher: 512", "epoch 1 ", "epoch 3 "])
@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_student(tmp_path: Path, last: str) -> None:
    whole, expected = run(tmp_path / "whole")

    def kill(line: str) -> None:
        if line.startswith(last):
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "parts", tell=kill)
    lines: list[str] = []
    found, result = run(tmp_path / "parts", tell=lines.append)
    assert result == expected and not [line for line in lines if line.startswith(last)]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert not any((tmp_path / "parts").iterdir())


@pytest.mark.slow
def test_what_another_recipe_or_a_broken_disk_left_is_not_used(tmp_path: Path) -> None:
    def kill(line: str) -> None:
        if line.startswith("epoch 2"):
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, tell=kill)
    (kept,) = tmp_path.iterdir()
    lines: list[str] = []
    run(tmp_path, Recipe(epochs=4, batch_size=16, seed=1), lines.append)
    assert next(line for line in lines if line.startswith("epoch")).startswith("epoch 1 ")
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    _, result = run(tmp_path, tell=lines.append)
    assert result == run(tmp_path / "other")[1]


@pytest.mark.slow
def test_a_student_learns_its_teachers_features(tmp_path: Path) -> None:
    student, found = run(tmp_path, Recipe(epochs=12, batch_size=16))
    assert found.losses[-1] < 0.6 * found.losses[0]
    assert (found.width, found.teacher_width, found.images) == (6, 12, 600)
    assert 0 < found.kept_variance < 1
    assert torch.equal(student.head.weight, residual(6, seed=1).head.weight)


def test_a_loss_that_is_not_finite_and_inputs_that_are_no_images_are_one_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingError, match="learning rate below 1e"):
        run(tmp_path, Recipe(epochs=4, batch_size=16, learning_rate=1e30))
    assert not any(tmp_path.iterdir())
    with pytest.raises(DatasetError, match="no images"):
        distil(residual(4), residual(8), np.zeros((4, 3), np.float32), RECIPE, tmp_path)
