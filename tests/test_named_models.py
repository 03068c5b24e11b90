"""Models named on a command line: torchvision's and module:callable, with one line for failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_elastic import named_models
from fl_elastic.errors import ModelError
from fl_elastic.named_models import build_model, model_builder, torchvision_names

SOURCE = """
import torch
from torch import nn


class Builders:
    @staticmethod
    def make():
        return nn.Linear(2, 3)


def make():
    return nn.Linear(4, 2)


def fails():
    raise KeyError("first line\\nsecond line")


def leaves():
    raise SystemExit(3)


def wrong():
    return [1, 2]


def needs(width):
    return nn.Linear(width, width)


ready = nn.Linear(1, 1)
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Write a module into a new working directory and return its name."""
    name = f"own_models_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    # As an installed command has it: the working directory is not on the path.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    return name


@pytest.mark.parametrize(("name", "shape"), [("make", (4, 2)), ("Builders.make", (2, 3))])
def test_a_function_of_a_module_in_the_working_directory_builds_the_model(
    module: str, name: str, shape: tuple[int, int]
) -> None:
    model = model_builder(f"{module}:{name}")()
    assert isinstance(model, nn.Linear) and (model.in_features, model.out_features) == shape


def test_build_model_seeds_a_callable_whose_module_draws_random_numbers(module: str) -> None:
    before = torch.get_rng_state()
    first, second = (build_model(f"{module}:make", (4,), 2, seed=9) for _ in range(2))
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("mak", r"has no 'mak' \(did you mean 'make'\?\)"),
        ("fails", r"calling fails\(\) failed: KeyError"),
        ("leaves", r"calling leaves\(\) failed: SystemExit"),
        ("needs", r"calling needs\(\) failed: TypeError: .*width"),
        ("wrong", r"wrong\(\) returned of type list, not a torch.nn.Module"),
        ("ready", "ready is of type Linear, not a function that builds a model"),
        ("number", "number is of type int, not a function that builds a model"),
    ],
)
def test_a_callable_that_gives_no_model_is_explained_in_one_line(
    module: str, attribute: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model_builder(f"{module}:{attribute}")()
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_is_explained_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_own_models.py").write_text("def make(:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, error in (("broken_own_models", "SyntaxError"), ("absent_models", "ModuleNotFound")):
        with pytest.raises(ModelError, match=f"cannot import {name}: {error}") as caught:
            model_builder(f"{name}:make")()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        *((spec, "not of the form module:callable") for spec in (":make", "json:", ":")),
        # Names that the laboratory registers are not looked up.
        ("digits_cnn", "unknown model 'digits_cnn'"),
        ("mobilenet_v5", r"'mobilenet_v5' \(did you mean 'mobilenet_v"),
    ],
)
def test_what_is_no_name_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_builder(spec)()


def test_torchvision_keeps_its_own_classes_unless_told() -> None:
    with torch.device("meta"):
        usual, own = model_builder("resnet18")(), model_builder("torchvision:resnet18", 4)()
    assert usual.get_parameter("fc.weight").shape[0] == 1000
    assert own.get_parameter("fc.weight").shape[0] == 4


def test_models_with_auxiliary_outputs_return_a_tensor_in_training() -> None:
    model = model_builder("googlenet", 4)().train()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4)


def test_without_torchvision_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ModelError, match="python -m pip install torchvision"):
        model_builder("resnet18")()


def test_without_torchvision_an_unknown_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "torchvision_names", lambda: ())
    assert "(torchvision is not installed)" in str(named_models.unknown_model("resnet18", []))


def test_the_names_that_are_read_from_torchvisions_files_are_those_that_it_has() -> None:
    models = pytest.importorskip("torchvision.models")
    assert torchvision_names() == tuple(sorted(models.list_models(module=models)))
