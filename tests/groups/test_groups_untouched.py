"""The block that leaves no trace."""

from __future__ import annotations

import pytest
import torch
from small_models import Batch, conv_net, images, loss_fn
from torch import Tensor, nn

from fl_elastic.groups.untouched import RngState, repeated_rng, untouched
from fl_elastic.planning.importance.elastic import probe_gradients
from fl_elastic.testing.probes import Snapshot, made_up_training


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


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """What a GPU draws from, as far as a machine without one can have it."""
    made = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    return made


class Noise(nn.Module):
    """Draws as a dropout on a GPU does."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


def test_a_gpu_draws_the_same_numbers_as_if_the_block_had_not_been(
    generator: torch.Generator,
) -> None:
    model = nn.Sequential(Noise(generator))
    expected = torch.randn(4, generator=torch.Generator().manual_seed(5))
    with untouched(model):
        model(torch.zeros(4))
    with untouched(model), repeated_rng(model):
        assert torch.equal(model(torch.zeros(4)), model(torch.zeros(4)))
    assert torch.equal(model(torch.zeros(4)), expected)


def test_that_a_gpu_has_drawn_is_seen(generator: torch.Generator) -> None:
    before = RngState.now()
    assert not before.moved()
    torch.randn(1, generator=generator)
    assert before.moved()
    before.put_back()
    assert not before.moved()


def test_importance_compares_gradients_under_the_same_draws_of_a_gpu(
    generator: torch.Generator,
) -> None:
    training = made_up_training()
    training.model.insert(0, Noise(generator))  # type: ignore[operator]
    probe = training.probe(1)
    weights = {n: p for n, p in training.model.named_parameters() if p.requires_grad}
    first, again = (probe_gradients(probe, probe.batches[0], weights) for _ in range(2))
    for name, gradient in first.items():
        assert torch.equal(gradient, again[name])


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
