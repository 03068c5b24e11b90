"""What a model does with its last layer's output is found by trying other numbers there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_elastic.readout.model_end import ModelEnd, link_of


class Ends(nn.Module):
    """A linear layer and something behind it."""

    def __init__(self, outputs: int, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.last, self.end = nn.Linear(3, 4), nn.Linear(4, outputs), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(torch.relu(self.body(x))))


def end_of(outputs: int, end: Callable[[Tensor], Tensor]) -> tuple[str, str, bool]:
    model = Ends(outputs, end)
    # Zeros have the same sigmoid as softmax.
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = ModelEnd.of(model, torch.randn(5, 3))
    assert not any(module._forward_hooks for module in model.modules())
    assert found.shape == tuple(model(torch.randn(5, 3)).shape)
    return found.layer, found.link, found.squeezed


@pytest.mark.parametrize(
    ("outputs", "end", "expected"),
    [
        (2, lambda out: out, ("last", "", False)),
        (2, lambda out: out.log_softmax(1), ("last", "log_softmax", False)),
        (2, lambda out: out.softmax(-1), ("last", "softmax", False)),
        (2, torch.sigmoid, ("last", "sigmoid", False)),
        (1, torch.sigmoid, ("last", "sigmoid", False)),
        (1, lambda out: out.squeeze(1), ("last", "", True)),
        (1, lambda out: out.sigmoid().flatten(), ("last", "sigmoid", True)),
        (2, lambda out: out.double(), ("last", "", False)),
        (2, lambda out: out.half().float().softmax(1).half(), ("last", "softmax", False)),
        # None of these is a linear layer with such a function.
        (2, torch.relu, ("", "", False)),
        (2, lambda out: out.relu_(), ("", "", False)),
        (1, lambda out: out.mul_(2.0).squeeze(1), ("", "", False)),
        (2, lambda out: out.clone(), ("", "", False)),
        (2, lambda out: out / 2, ("", "", False)),
        (2, lambda out: out.softmax(0), ("", "", False)),
        (2, lambda out: torch.log(out.softmax(1) + 0.1), ("", "", False)),
        (2, lambda out: out.argmax(1), ("", "", False)),
        (2, lambda out: out[:, :1], ("", "", False)),
        (4, lambda out: out.view(-1, 2, 2), ("", "", False)),
    ],
)
def test_it_is_found_whatever_the_weights(
    outputs: int, end: Callable[[Tensor], Tensor], expected: tuple[str, str, bool]
) -> None:
    assert end_of(outputs, end) == expected


@pytest.mark.parametrize("end", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [1, -1])
def test_the_axis_of_the_classes_is_that_of_the_layer(end: str, axis: int) -> None:
    scores = torch.randn(4, 5, 6)
    assert link_of(getattr(scores, end)(axis), scores, axis) == end
    assert link_of(getattr(scores, end)(0), scores, axis) is None


def test_outputs_are_made_of_scores_as_the_model_makes_them() -> None:
    torch.manual_seed(0)
    for outputs, end in (
        (3, lambda out: out.log_softmax(1)),
        (1, lambda out: out.sigmoid().squeeze(1)),
    ):
        model = Ends(outputs, end)
        x = torch.randn(5, 3)
        scores = model.last(torch.relu(model.body(x)))
        torch.testing.assert_close(ModelEnd.of(model, x).made_of(scores), model(x))
