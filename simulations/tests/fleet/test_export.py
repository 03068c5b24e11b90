"""The model of a run whose app is the user's own: how to get it is said, and it is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fl_elastic.errors import CheckpointError
from fl_elastic.flower.checkpoint import Checkpointed, load_checkpoint
from fl_elastic_simulations.fleet.export import export_run


def test_the_model_of_an_app_of_ones_own_is_had_by_what_the_refusal_says(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no .*and no checkpoint"):
        export_run(tmp_path, tmp_path / "model.safetensors")
    model, trained = nn.Linear(3, 2), nn.Linear(3, 2)
    Checkpointed(FedAvg(), tmp_path / "checkpoints")._save(4, ArrayRecord(trained.state_dict()))
    with pytest.raises(CheckpointError) as refused:
        export_run(tmp_path, tmp_path / "model.safetensors")
    (line,) = re.findall(r"load_checkpoint\(.*?\)\)\.arrays", str(refused.value))
    names = {"load_checkpoint": load_checkpoint, "ArrayRecord": ArrayRecord, "model": model}
    found = eval(line, names)
    model.load_state_dict({name: torch.as_tensor(array) for name, array in found.items()})
    assert torch.equal(model.weight, trained.weight) and torch.equal(model.bias, trained.bias)
