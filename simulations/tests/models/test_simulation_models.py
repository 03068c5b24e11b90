"""Named models: right shapes, same weights for the same seed, parameters spread over the depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.errors import ModelError
from fl_elastic.named_models import MODELS, build_model, check_model_name

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "digits_cnn": [(1, 8, 8)],
    "digits_cnn_bn": [(1, 8, 8)],
    "small_cnn": [(1, 28, 28), (3, 32, 32)],
    "small_vit": [(3, 64, 64), (3, 32, 32), (1, 28, 28)],
    "har_cnn": [(6, 128)],
    "resnet8": [(3, 32, 32), (1, 28, 28)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def _sizes(model: nn.Module) -> list[int]:
    return [parameter.numel() for parameter in model.parameters()]


def test_every_registered_model_is_tested_here() -> None:
    assert MODELS.names() == sorted(SHAPES)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_training_step_reaches_every_parameter(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, shape, 7, seed=0)
    outputs = model(torch.randn(3, *shape))
    loss: Tensor = functional.cross_entropy(outputs, torch.tensor([0, 3, 6]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert outputs.shape == (3, 7)
    missed = [key for key, value in model.named_parameters() if value.grad is None]
    assert missed == []


@pytest.mark.parametrize("name", [*SHAPES, "squeezenet1_1"])
def test_weights_depend_on_the_seed_only(name: str) -> None:
    shape = SHAPES.get(name, [(3, 64, 64)])[0]
    torch.manual_seed(1)
    first = build_model(name, shape, 5, seed=3).state_dict()
    torch.manual_seed(2)
    second = build_model(name, shape, 5, seed=3).state_dict()
    other = build_model(name, shape, 5, seed=4).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    build_model("digits_cnn", (1, 8, 8), 10, seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "least", "most", "largest_share"),
    [
        ("digits_cnn", 40_000, 80_000, 0.45),
        ("small_cnn", 150_000, 250_000, 0.45),
        ("small_vit", 400_000, 700_000, 0.1),
        ("har_cnn", 30_000, 60_000, 0.5),
    ],
)
def test_parameters_are_many_enough_and_not_all_in_one_place(
    name: str, least: int, most: int, largest_share: float
) -> None:
    sizes = _sizes(build_model(name, SHAPES[name][0], 10, seed=0))
    assert least <= sum(sizes) <= most
    assert max(sizes) / sum(sizes) <= largest_share


@pytest.mark.parametrize("name", list(SHAPES))
def test_only_models_named_so_have_batch_normalisation(name: str) -> None:
    model = build_model(name, SHAPES[name][0], 10, seed=0)
    has = any(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    assert has == name.endswith("_bn")


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
def test_torchvision_models_get_the_number_of_classes(name: str) -> None:
    model = build_model(name, (3, 64, 64), 7, seed=0)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("small_cnn", (1, 8, 8), "at least 16x16 pixels"),
        ("digits_cnn", (6, 128), r"not inputs of shape \(6, 128\)"),
        ("har_cnn", (1, 28, 28), r"not inputs of shape \(1, 28, 28\)"),
        ("resnet18", (1, 28, 28), "3 channels"),
        ("small_cnn", (), r"inputs of shape \(\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        build_model(name, shape, 10, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("digits_cn", "digits_cnn"),
        ("resnt18", "resnet18"),
        ("torchvision:mobilenet_v22", "mobilenet_v2"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"did you mean '{nearest}'") as caught:
        check_model_name(name)
    with pytest.raises(ModelError, match=f"did you mean '{nearest}'"):
        build_model(name, (3, 32, 32), 10, seed=0)
    assert "\n" not in str(caught.value)


def test_a_callable_is_not_imported_by_the_check() -> None:
    check_model_name("no_such_module_anywhere:build")
    with pytest.raises(ModelError, match="unknown model ':build'"):
        check_model_name(":build")
