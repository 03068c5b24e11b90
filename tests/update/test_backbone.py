"""Prepared backbones: what is kept of a model, and who may load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.flower import initial_arrays
from fl_elastic.state.archive import is_archive
from fl_elastic.update.backbone import load_backbone, write_backbone
from fl_elastic.update.manifest import FROZEN_BASE

HEAD = ("3.weight", "3.bias")


def net(classes: int = 3, seed: int = 0, width: int = 4) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, width, 3),
            nn.BatchNorm2d(width),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )
        model(torch.randn(5, 3, 4, 4))
    return model


def test_a_backbone_goes_into_a_model_with_another_head(tmp_path: Path) -> None:
    source, other = net(), net(classes=7, seed=1)
    head = other[3].weight.clone()
    write_backbone(tmp_path / "b.fle", source, HEAD, {"teacher": "somebody"})
    assert load_backbone(other, tmp_path / "b.fle") == HEAD
    assert is_archive(tmp_path / "b.fle")
    for name, tensor in source[:3].state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert torch.equal(other[3].weight, head)


def test_the_digest_is_what_a_server_sends_of_a_frozen_backbone(tmp_path: Path) -> None:
    digest = write_backbone(tmp_path / "b.fle", net(), HEAD)
    other = net(classes=7, seed=1)
    load_backbone(other, tmp_path / "b.fle")
    other[:3].requires_grad_(False)
    sent = initial_arrays(other)
    assert sorted(sent) == sorted([*HEAD, FROZEN_BASE])
    assert sent[FROZEN_BASE].numpy().tobytes().hex() == digest
    assert write_backbone(tmp_path / "b.fle", net(seed=1), HEAD) != digest


def test_a_misfit_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "b.fle"
    write_backbone(path, net(), HEAD)
    for model, reason in (
        (net(width=5), "the model has \\(5, 3, 3, 3\\)"),
        (nn.Linear(2, 2), "no such tensor"),
        (net(seed=1).double(), "another order or dtype"),
        (nn.Sequential(net(seed=1)[:3], nn.Identity()), "no such tensor"),
    ):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ModelError, match=reason):
            load_backbone(model, path)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "b.fle"
    write_backbone(path, net(), HEAD)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-1] + b"x", b"", b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="is not used") as caught:
            load_backbone(net(), path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="no backbone to write"):
        write_backbone(path, nn.Linear(2, 2), ("weight", "bias"))
