"""Which modules have a lean forward, and which inputs it is for."""

from __future__ import annotations

import pytest
import torch
from kept_bytes import kept_bytes
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fl_elastic.groups import Mode
from fl_elastic.ops.lean_forward import lean_forward

# What stands in the names of tests has to be the same in every process.
torch.manual_seed(0)
CONV = nn.Conv2d(4, 8, 3)


class OwnForward(nn.Conv2d):
    """A convolution that scales its weight first."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, 2 * self.weight, self.bias)


class Renamed(nn.Conv2d):
    """A convolution that computes what its base does."""


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        (CONV, Mode.FULL),
        (nn.Linear(4, 2), Mode.FROZEN),
        (nn.Linear(4, 2), Mode.FULL),
        (nn.Linear(4, 2), Mode.filtered(2)),
        (nn.BatchNorm2d(4).eval(), Mode.FULL),
        (nn.BatchNorm2d(4).requires_grad_(False), Mode.FROZEN),
        (nn.BatchNorm2d(4, track_running_stats=False).eval().requires_grad_(False), Mode.FROZEN),
        (nn.Conv1d(4, 2, 3), Mode.FROZEN),
        (nn.Conv3d(4, 2, 3), Mode.BIAS),
        (nn.ConvTranspose2d(4, 2, 3), Mode.BIAS),
        (nn.Conv2d(4, 2, 2, padding="same"), Mode.FROZEN),
        (nn.Conv2d(4, 2, 3, padding=1, padding_mode="replicate"), Mode.filtered(2)),
        (OwnForward(4, 2, 3), Mode.FROZEN),
        (nn.MaxPool2d(3, ceil_mode=True), Mode.FROZEN),
        (nn.MaxPool2d(3, dilation=2), Mode.FROZEN),
        (nn.MaxPool2d(3, return_indices=True), Mode.FROZEN),
        (nn.MaxPool2d(17), Mode.FROZEN),
        (nn.MaxPool1d(3), Mode.FROZEN),
        (nn.GELU(), Mode.FROZEN),
        (nn.Sequential(CONV), Mode.FROZEN),
    ],
    ids=str,
)
def test_plain_torch_where_nothing_else_is_right(module: nn.Module, mode: Mode) -> None:
    assert lean_forward(module, mode) is None


@pytest.mark.parametrize(
    ("module", "mode", "x"),
    [
        (CONV, Mode.FROZEN, torch.randn(2, 4, 6, 6)),
        (CONV, Mode.BIAS, torch.randn(4, 6, 6)),
        (CONV, Mode.filtered(2), torch.randn(2, 4, 6, 6)),
        (nn.Conv2d(4, 2, 3, padding="same"), Mode.FROZEN, torch.randn(2, 4, 6, 6)),
        (Renamed(4, 2, 3), Mode.FROZEN, torch.randn(2, 4, 6, 6)),
        (nn.Linear(4, 2), Mode.BIAS, torch.randn(3, 2, 4)),
        (nn.BatchNorm1d(4).eval().requires_grad_(False), Mode.FROZEN, torch.randn(3, 4)),
        (nn.BatchNorm2d(4).eval().requires_grad_(False), Mode.FROZEN, torch.randn(3, 4, 2, 2)),
        (nn.BatchNorm3d(4).eval().requires_grad_(False), Mode.FULL, torch.randn(3, 4, 2, 2, 2)),
        (nn.BatchNorm2d(4, affine=False).eval(), Mode.FROZEN, torch.randn(3, 4, 2, 2)),
        (nn.ReLU(), Mode.FULL, torch.randn(5)),
        (nn.ReLU6(), Mode.FROZEN, torch.randn(5, 2)),
        (nn.Hardswish(), Mode.FROZEN, torch.randn(5, 2)),
        (nn.MaxPool2d((3, 2), 1, (0, 1)), Mode.FROZEN, torch.randn(2, 4, 5, 5)),
        (nn.MaxPool2d(2), Mode.FROZEN, torch.randn(4, 5, 5)),
    ],
    ids=str,
)
def test_a_lean_forward_computes_the_same(module: nn.Module, mode: Mode, x: Tensor) -> None:
    forward = lean_forward(module, mode)
    assert forward is not None
    for needs in (False, True):
        inputs = x.clone().requires_grad_(needs)
        assert torch.equal(forward(inputs), module(inputs))
    with torch.no_grad():
        assert torch.equal(forward(inputs), module(inputs))
    assert kept_bytes(lambda: forward(inputs)) <= kept_bytes(lambda: module(inputs))


def test_wrong_shapes_are_refused_in_torchs_words() -> None:
    norm = nn.BatchNorm2d(4).eval().requires_grad_(False)
    forward = lean_forward(norm, Mode.FROZEN)
    assert forward is not None
    with pytest.raises(ValueError, match="expected 4D"):
        forward(torch.randn(3, 4, requires_grad=True))


def test_integers_go_to_torch() -> None:
    forward = lean_forward(nn.ReLU(), Mode.FROZEN)
    assert forward is not None
    assert forward(torch.tensor([-1, 2])).tolist() == [0, 2]


def test_a_frozen_lstm_passes_gradients_on_where_they_are_needed() -> None:
    lstm = nn.LSTM(4, 3, 2, batch_first=True).requires_grad_(False)
    forward = lean_forward(lstm, Mode.FROZEN)
    assert forward is not None and lean_forward(lstm, Mode.FULL) is None
    x, state = torch.randn(5, 7, 4), (torch.randn(2, 5, 3), torch.randn(2, 5, 3))
    packed = pack_padded_sequence(x, torch.tensor([7, 6, 4, 2, 1]), batch_first=True)
    for given in ((x,), (x, state), (packed, state)):
        (lean, _), (plain, _) = forward(*given), lstm(*given)  # type: ignore[call-arg, arg-type]
        torch.testing.assert_close(lean, plain)
        data = lean.data if isinstance(lean, PackedSequence) else lean
        assert not data.requires_grad
    for needing in (x, state[1]):
        needing.requires_grad_()
        lean = forward(x, hx=state)[0]  # type: ignore[call-arg]
        (found,) = torch.autograd.grad(lean.sum(), needing)
        (wanted,) = torch.autograd.grad(lstm(x, state)[0].sum(), needing)
        assert torch.equal(found, wanted)
        needing.requires_grad_(False)
    lstm.bias_ih_l1.requires_grad_()
    assert forward(x)[0].requires_grad
