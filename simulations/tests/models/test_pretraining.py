"""Pretraining on images: the head is not kept, the test is not learnt, weights depend on the recipe alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.models.class_token_vit import HEAD, class_token_vit
from fl_elastic_simulations.models.pretrained import load_pretrained
from fl_elastic_simulations.models.pretraining import Recipe, of_images, pretraining


def small(classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()))
    model.add_module("heads", nn.Linear(16, classes))
    return model


def test_a_model_learns_and_is_kept_without_its_head(tmp_path: Path) -> None:
    lessons = of_images(small, "digits", "", left=HEAD, tested=100)
    recipe = Recipe(steps=150, batch_size=32, learning_rate=1e-2, warm_up=10)
    found = []
    for name in ("one", "two"):
        row = pretraining(recipe, lessons, tmp_path / name / "weights.npz")
        assert row["accuracy"] > 0.7 and row["images"] == len(load_dataset("digits").train_x)
        model = small(4, seed=5)
        assert load_pretrained(model, tmp_path / name / "weights.npz") == (
            "heads.weight",
            "heads.bias",
        )
        found.append(model.get_parameter("body.1.weight"))
    assert torch.equal(*found)
    assert sum(len(targets) for _, targets in lessons.tested) == 100
    drawn, _ = lessons.draw(np.random.default_rng(0), 4)
    assert drawn.shape == (4, 1, 8, 8)


def test_the_transformer_answers_from_its_class_token_by_its_seed_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (class_token_vit(5, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    head = f"{HEAD}head.weight"
    assert torch.equal(one.get_parameter(head), same.get_parameter(head))
    assert not torch.equal(one.get_parameter(head), other.get_parameter(head))
    one.eval()
    images = torch.randn(2, 3, 32, 32)
    one(images).sum().backward()
    # A head of zeros would hand nothing on.
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in one.parameters())
