"""Latent replay: features are stored, only what is above is trained, and stale features go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Attention, Residual, conv_net
from torch import nn
from toy_streams import Sample, adam, blobs, closed, learner_in, net, run, weights

from fl_elastic.budget import Budget
from fl_elastic.errors import ModelError, StreamError
from fl_elastic.losses import classification_loss
from fl_elastic.streaming import Latent, Trigger
from fl_elastic.streaming.latent import UpperPart


def pictures(count: int, seed: int = 0) -> list[Sample]:
    """Pictures of three classes that differ in colour."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(3, size=count)
    colours = np.eye(3, dtype=np.float32)[labels][:, :, None, None] * 2
    x = generator.normal(size=(count, 3, 8, 8)).astype(np.float32) + colours
    return list(zip(x, labels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("model", "groups"), [(conv_net, 1), (conv_net, 4), (Residual, 1), (Attention, 1)]
)
def test_both_parts_give_what_the_model_gives(model: Any, groups: int) -> None:
    whole = model().eval()
    shape = (6,) if model is Attention else (3, 8, 8)
    x = np.random.default_rng(0).normal(size=(5, *shape)).astype(np.float32)
    expected = whole(torch.from_numpy(x)).detach().numpy()
    trainable = [each.requires_grad for each in whole.parameters()]
    body = UpperPart(whole, Latent(groups), classification_loss, x[0])
    looked = [body.look(each) for each in x]
    assert np.allclose([scores for _, scores in looked], expected, atol=1e-4)
    features = np.stack([kept for kept, _ in looked])
    above = body.module(body.as_inputs(features)).detach().numpy()
    assert np.allclose(above, expected, atol=1e-4)
    # The model itself runs as ever beside it.
    assert np.allclose(whole(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-6)
    body.close()
    assert [each.requires_grad for each in whole.parameters()] == trainable
    assert "forward" not in {name for each in whole.modules() for name in vars(each)}


def test_only_what_is_above_is_trained_and_features_are_small(tmp_path: Path) -> None:
    model = conv_net()
    learner = learner_in(
        tmp_path, model, encoding="int8", latent=Latent(1), capacity=2**20, steps=20,
        optimizer_fn=lambda p: torch.optim.Adam(p, lr=0.05), trigger=Trigger(30, None),
    )  # fmt: skip
    before = weights(learner)
    seen = run(learner, pictures(150))
    after = weights(learner)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"11.weight", "11.bias"}
    assert learner.store.sample(1).x.shape == (1, 8)
    assert learner.progress.adaptations == 5 and learner.adaptations[0].trained == ("model.11",)
    assert np.mean([each.correct for each in seen[-50:]]) > 0.6
    with torch.no_grad():
        x = pictures(1, seed=9)[0][0]
        expected = int(model(torch.from_numpy(x)[None]).argmax())
    assert learner.observe(x).prediction == learner.classes[expected]
    closed(learner)
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("encoding", ["raw", "fp16", "int8"])
def test_a_label_for_features_that_are_gone_costs_nothing(encoding: str, tmp_path: Path) -> None:
    learner = learner_in(
        tmp_path, encoding=encoding, latent=Latent(1), trigger=Trigger(10**6, None)
    )
    first = learner.observe(blobs(1)[0][0])
    run(learner, blobs(20))
    assert learner.store.delete(ids=[first.sample_id]) == 1
    assert not learner.label(first.sample_id, 1).refused
    assert learner.label(first.sample_id + 1000, 1).refused == "no such sample"
    assert not learner.observe(*blobs(1)[0]).refused
    closed(learner)


def made(folder: Path, **given: Any) -> Any:
    settings = {
        "encoding": "int8", "latent": Latent(2), "policy": "elastic", "budget": Budget(speedup=1.3),
        "trigger": Trigger(30, None), "capacity": 2**17,
    }  # fmt: skip
    return learner_in(folder, net(dropout=0.2), **(settings | given))


def test_features_of_another_cut_are_deleted_after_a_restart(tmp_path: Path) -> None:
    learner = made(tmp_path, latent=Latent(1))
    run(learner, blobs(40))
    closed(learner)
    again = made(tmp_path, latent=Latent(1))
    assert len(again.store) == 36
    closed(again)
    # Features above the second layer and above the third have the same shape, but are no others' equals.
    other = made(tmp_path, latent=Latent(2))
    assert len(other.store) == 0 and other.progress.observed == 40
    assert not any(each.refused for each in run(other, blobs(40, seed=1)))
    closed(other)


def test_where_no_cut_is_possible(tmp_path: Path) -> None:
    for wrong in (0, "conv1"):
        with pytest.raises(StreamError, match="at least 1"):
            Latent(wrong)  # type: ignore[arg-type]
    learner = made(tmp_path, latent=Latent(3))
    with pytest.raises(
        ModelError, match=r"below the first 3 of 3 groups: the model can be cut below 1, 2"
    ):
        run(learner, blobs(1))
    closed(learner)


def test_norms_below_the_cut_keep_their_statistics(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12),
        nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip
    learner = learner_in(tmp_path, model, latent=Latent(3), optimizer_fn=adam)
    before = weights(learner)
    run(learner, blobs(120))
    after = weights(learner)
    assert learner.progress.adaptations == 2
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "0.weight"):
        assert np.array_equal(before[name], after[name])
    assert not np.array_equal(before["4.running_mean"], after["4.running_mean"])
    closed(learner)
