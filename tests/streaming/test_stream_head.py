"""Class maps, and heads that grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import TiedEmbedding, TiedLinears, conv_net, images
from torch import nn

from fl_elastic.errors import ModelError, StreamError
from fl_elastic.streaming.growing_head import ClassMap, grow_head, head_name
from fl_elastic.update import Manifest


def test_labels_stand_in_the_order_of_their_appearance() -> None:
    classes = ClassMap()
    for label in (5, 2, 5, 9):
        classes = classes.with_label(label)
    assert classes.labels == (5, 2, 9) and len(classes) == 3 and 9 in classes and 1 not in classes
    assert classes.outputs(np.array([9, 5])).tolist() == [2, 0]
    assert [classes.label(place) for place in range(3)] == [5, 2, 9]
    assert classes.with_label(4).labels[:3] == classes.labels
    with pytest.raises(StreamError, match="label 7"):
        classes.outputs(np.array([7]))
    with pytest.raises(StreamError, match="twice"):
        ClassMap((1, 1))


def test_old_rows_stay_bit_for_bit_and_new_ones_are_small() -> None:
    model = conv_net()
    name = head_name(model)
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    weight, bias, before = (
        old.weight.detach().clone(),
        old.bias.detach().clone(),
        Manifest.of(model),
    )
    assert grow_head(model, name, 5, seed=1) and not grow_head(model, name, 4, seed=1)
    new = model.get_submodule(name)
    assert isinstance(new, nn.Linear) and new.out_features == 5
    assert torch.equal(new.weight[:3], weight) and torch.equal(new.bias[:3], bias)
    assert 0 < new.weight[3:].abs().max() < 0.1 and not new.bias[3:].any()
    assert not torch.equal(new.weight[3], new.weight[4])
    assert Manifest.of(model).hash != before.hash
    assert model(images()[0][0]).shape == (6, 5)


def test_growing_twice_is_growing_by_two_and_draws_no_global_number() -> None:
    models = [conv_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    state = torch.random.get_rng_state()
    grow_head(models[0], "11", 5, seed=3)
    grow_head(models[1], "11", 4, seed=3)
    grow_head(models[1], "11", 5, seed=3)
    assert torch.equal(models[0].get_submodule("11").weight, models[1].get_submodule("11").weight)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_head_without_bias_and_in_double_precision() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).double()
    grow_head(model, "1", 3, seed=0)
    head = model[1]
    assert isinstance(head, nn.Linear) and head.bias is None
    assert head.weight.dtype == torch.float64 and head.weight.shape == (3, 2)


def test_heads_that_cannot_grow() -> None:
    with pytest.raises(ModelError, match="tied"):
        grow_head(TiedLinears(), "first", 9, seed=0)
    with pytest.raises(ModelError, match="tied"):
        grow_head(TiedEmbedding(), "output", 12, seed=0)
    with pytest.raises(ModelError, match="Conv2d"):
        grow_head(conv_net(), "0", 9, seed=0)
    with pytest.raises(ModelError, match="no linear layer"):
        head_name(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.raises(ModelError, match="no linear layer"):
        head_name(nn.Linear(2, 2))
