"""The block that leaves no trace."""

from __future__ import annotations

import pytest
import torch
from small_models import Batch, conv_net, images, loss_fn
from torch import Tensor, nn

from fl_elastic.groups.untouched import untouched
from fl_elastic.testing.probes import Snapshot


def train_on(model: nn.Module, batch: Batch) -> None:
    torch.autograd.backward(loss_fn(model(batch[0]), batch[1]))


def test_forward_backward_flags_and_modes_are_undone() -> None:
    model = conv_net()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    train_on(model, images()[0])
    before = Snapshot(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    with untouched(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        model.requires_grad_(True).train()
        train_on(model, images(seed=1)[0])
        torch.rand(3)
        assert before.differences() != []
    assert before.differences() == []
    assert all(g is p.grad for g, p in zip(gradients, model.parameters(), strict=True))


def test_everything_is_undone_after_an_error_too() -> None:
    model = conv_net()
    before = Snapshot(model)
    with pytest.raises(KeyError), untouched(model):
        model.eval().requires_grad_(False)
        torch.rand(3)
        next(model.buffers()).add_(1)
        raise KeyError("x")
    assert before.differences() == []


class Counting(nn.Module):
    """Keeps statistics by assigning new tensors, and makes one buffer only when first used."""

    calls: Tensor
    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        """Count, and remember the mean."""
        self.calls = self.calls + 1
        self.mean = x.mean()
        out: Tensor = self.linear(x)
        return out


def test_buffers_that_a_model_replaces_are_put_back() -> None:
    model = Counting()
    calls = model.calls
    with untouched(model):
        model(torch.randn(2, 6))
        assert model.calls.item() == 1
    assert model.calls is calls and model.calls.item() == 0
    assert model.mean is None
    assert list(model.state_dict()) == ["calls", "linear.weight", "linear.bias"]
