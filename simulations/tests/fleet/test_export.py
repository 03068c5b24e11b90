"""The model of a run whose app is the user's own: how to get it is said, and it is so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file
from torch import nn

from fl_elastic.aggregation import ModelAverage
from fl_elastic.errors import CheckpointError
from fl_elastic.flower import PartialUpdates
from fl_elastic.flower.checkpoint import Checkpointed, load_checkpoint
from fl_elastic.flower.records import as_record
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.engine.workload import scenario_model
from fl_elastic_simulations.fleet.export import export_run
from fl_elastic_simulations.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def test_the_model_of_an_app_of_ones_own_is_had_by_what_the_refusal_says(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no .*and no checkpoint"):
        export_run(tmp_path, tmp_path / "model.safetensors")
    model, trained = nn.Linear(3, 2), nn.Linear(3, 2)
    Checkpointed(FedAvg(), tmp_path / "checkpoints")._save(4, ArrayRecord(trained.state_dict()))
    with pytest.raises(CheckpointError) as refused:
        export_run(tmp_path, tmp_path / "model.safetensors")
    (line,) = re.findall(r"load_checkpoint\(.*?\)\)\.tested", str(refused.value))
    names = {"load_checkpoint": load_checkpoint, "ArrayRecord": ArrayRecord, "model": model}
    found = eval(line, names)
    model.load_state_dict({name: torch.as_tensor(array) for name, array in found.items()})
    assert torch.equal(model.weight, trained.weight) and torch.equal(model.bias, trained.bias)


def test_what_is_exported_is_the_model_that_the_run_tested(tmp_path: Path) -> None:
    """Rounds go on from the newest model; the mean of the rounds is tested, and is the result."""
    path = SCENARIOS / "demo.toml"
    model = scenario_model(Scenario.load(path), None, 0)
    strategy = PartialUpdates(FedAvg(), average=ModelAverage(0.5))
    weights = weights_of(model, Manifest.of(model))
    newest = {name: np.asarray(each + 1, each.dtype) for name, each in weights.items()}
    assert strategy.average is not None
    for each in (weights, newest):
        strategy.average.add(each)
    Checkpointed(strategy, tmp_path / "checkpoints")._save(1, as_record(newest))
    export_run(tmp_path, tmp_path / "model.safetensors", scenario=path)
    exported = load_file(tmp_path / "model.safetensors")
    for name, each in strategy.average.weights().items():
        np.testing.assert_array_equal(exported[name], each, err_msg=name)
