"""Exported models compute what the model computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.model_export import export_model
from fl_elastic.readout import Readout
from fl_elastic.update import Manifest, weights_of


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.fixture
def trained() -> tuple[nn.Module, dict[str, np.ndarray]]:
    other = model_of(1)
    other(torch.randn(8, 1, 4, 4))
    return other.eval(), weights_of(other, Manifest.of(other))


def test_safetensors_hold_the_state_dict(
    trained: tuple[nn.Module, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model, weights = trained
    path = export_model(model_of(0), weights, tmp_path / "m.safetensors", torch.zeros(1, 1, 4, 4))
    again = model_of(2)
    again.load_state_dict(load_file(path))
    inputs = torch.randn(5, 1, 4, 4)
    torch.testing.assert_close(again.eval()(inputs), model(inputs), rtol=0, atol=0)


def test_tied_weights_are_under_each_of_their_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    weights = weights_of(tied, Manifest.of(tied))
    path = export_model(tied, weights, tmp_path / "m.safetensors", torch.zeros(1, 3))
    assert set(load_file(path)) == set(tied.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_onnx_computes_the_same_for_any_batch(
    size: int, trained: tuple[nn.Module, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    model, weights = trained
    path = export_model(model_of(0), weights, tmp_path / "m.onnx", torch.zeros(1, 1, 4, 4))
    inputs = torch.randn(size, 1, 4, 4)
    found = ReferenceEvaluator(onnx.load(path)).run(None, {"input": inputs.numpy()})[0]
    np.testing.assert_allclose(found, model(inputs).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "places",
    [pytest.param("2@grid2", marks=pytest.mark.slow), "mirrored:input@grid2+2@grid1>3"],
)
def test_a_readout_is_exported_to_onnx_for_any_batch(places: str, tmp_path: Path) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    readout = Readout(model_of(1), places, torch.zeros(2, 1, 4, 4), 3).eval()
    nn.init.normal_(readout.head.weight)
    if readout.projection is not None:
        readout.projection.matrix.random_(-100, 100)
    weights = weights_of(readout, Manifest.of(readout))
    path = export_model(readout, weights, tmp_path / "m.onnx", torch.zeros(1, 1, 4, 4))
    for size in (1, 5):
        inputs = torch.randn(size, 1, 4, 4)
        found = ReferenceEvaluator(onnx.load(path)).run(None, {"input": inputs.numpy()})[0]
        np.testing.assert_allclose(found, readout(inputs).detach().numpy(), atol=1e-5)


def test_an_unknown_ending_is_refused(
    trained: tuple[nn.Module, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"\.safetensors and \.onnx"):
        export_model(model_of(0), trained[1], tmp_path / "m.pt", torch.zeros(1, 1, 4, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["m.safetensors", pytest.param("m.onnx", marks=pytest.mark.slow)])
def test_export_leaves_the_modes_of_the_model(
    name: str, trained: tuple[nn.Module, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model = model_of(0).train()
    model[1].eval()
    export_model(model, trained[1], tmp_path / name, torch.zeros(1, 1, 4, 4))
    assert [each.training for each in model] == [True, False, True, True, True]
