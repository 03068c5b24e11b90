"""The rows of the last layer that a model's scores are: its output in another shape, or one row of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.errors import TrainingError
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import solve_head

FEATURES, TOKENS, SIDE, BATCH = 5, 4, 3, 6
Change = Callable[[Tensor, Tensor], Tensor]


class Ends(nn.Module):
    """A last layer, and what a model does with its output, given its input."""

    def __init__(self, layer: nn.Module, change: Change) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x), x)


def last_token(out: Tensor, x: Tensor) -> Tensor:
    """Padding is zeros at the end, as for the classifiers that transformers makes of decoders."""
    length = (x.abs().sum(dim=2) > 0).sum(dim=1)
    return out[torch.arange(len(out)), length - 1]


def vectors() -> Tensor:
    return torch.randn(BATCH, FEATURES)


def padded() -> Tensor:
    x = torch.randn(BATCH, TOKENS, FEATURES)
    for example, length in enumerate(torch.randint(1, TOKENS + 1, (BATCH,))):
        x[example, length:] = 0.0
    return x


def maps(side: int = SIDE) -> Tensor:
    return torch.randn(BATCH, FEATURES, side, side)


def positions(x: Tensor) -> Tensor:
    return x.movedim(1, -1).reshape(-1, FEATURES)


def ends_of(x: Tensor) -> Tensor:
    return last_token(x, x)


def conv(given: int, outputs: int) -> nn.Module:
    return nn.Conv2d(given, outputs, 1)


NUMBERS: dict[str, Any] = {
    "one number without its axis": (nn.Linear, 1, lambda out, _: out.squeeze(-1), vectors, None),
    "several in a table": (nn.Linear, 6, lambda out, _: out.view(-1, 2, 3), vectors, None),
    "a number a token": (nn.Linear, 1, lambda out, _: out.squeeze(2), padded, None),
    "a map of one number": (conv, 1, lambda out, _: out.squeeze(1), maps, positions),
    "a map in a row": (conv, 2, lambda out, _: out.flatten(2), maps, positions),
    "that of the last token": (nn.Linear, 1, last_token, padded, ends_of),
    "several of the first token": (nn.Linear, 3, lambda out, _: out[:, 0].clone(), padded,
                                   lambda x: x[:, 0]),
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "a map of one position": (conv, 3, lambda out, _: out.flatten(1), lambda: maps(1), positions),
    "tokens in a row": (nn.Linear, 3, lambda out, _: out.view(-1, 3), padded, None),
    "maps in a row": (conv, 3, lambda out, _: out.flatten(2), maps, positions),
    "the last token": (nn.Linear, 3, last_token, padded, ends_of),
    "the token with the largest sum": (
        nn.Linear, 3, lambda out, x: out[torch.arange(BATCH), x.sum(dim=2).argmax(dim=1)], padded,
        lambda x: x[torch.arange(BATCH), x.sum(dim=2).argmax(dim=1)],
    ),
}  # fmt: skip


def assert_sums(model: nn.Module, data: Any, rows: list[Tensor], wanted: list[Tensor]) -> None:
    """The sums against products of the rows that the scores were computed from."""
    found = head_sums(model, data)
    x = torch.cat(rows).double().numpy()
    x, y = np.hstack([x, np.ones((len(x), 1))]), torch.cat(wanted).double().numpy()
    np.testing.assert_allclose(found.products, x.T @ x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.targets, x.T @ y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_any_shape_are_those_of_the_layer(name: str) -> None:
    torch.manual_seed(len(name))
    layer, outputs, change, inputs, rows_of = NUMBERS[name]
    model = Ends(layer(FEATURES, outputs), change)
    data, rows, wanted = [], [], []
    for _ in range(8):
        x = inputs()
        targets = torch.randn(model(x).shape)
        data.append((x, targets))
        rows.append(x.reshape(-1, FEATURES) if rows_of is None else rows_of(x))
        first = targets.reshape(BATCH, outputs, -1).movedim(1, 2) if layer is conv else targets
        wanted.append(first.reshape(-1, outputs))
    assert_sums(model, data, rows, wanted)
    head, _ = solve_head(model, data, loss_fn=functional.mse_loss)
    assert np.isfinite(head.error)


@pytest.mark.parametrize("name", CLASSES)
def test_class_scores_in_any_shape_are_those_of_the_layer(name: str) -> None:
    torch.manual_seed(len(name))
    layer, outputs, change, inputs, rows_of = CLASSES[name]
    model = Ends(layer(FEATURES, outputs), change)
    data, rows, wanted = [], [], []
    for _ in range(8):
        x = inputs()
        scores = model(x)
        targets = torch.randint(outputs, scores.select(1, 0).shape)
        data.append((x, targets))
        rows.append(x.reshape(-1, FEATURES) if rows_of is None else rows_of(x))
        wanted.append(functional.one_hot(targets.reshape(-1), outputs))
    assert_sums(model, data, rows, wanted)
    head, _ = solve_head(model, data, loss_fn=functional.cross_entropy)
    assert np.isfinite(head.error)


def test_labels_without_their_axis_are_solved_for_as_log_odds() -> None:
    torch.manual_seed(0)
    x = torch.randn(80, FEATURES)
    y = (x[:, 0] > 0).float()
    data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 80, 8)]
    heads = []
    for change, targets in ((lambda out, _: out.squeeze(1), 0), (lambda out, _: out, 1)):
        model = Ends(nn.Linear(FEATURES, 1), change)
        given = [(a, b[:, None] if targets else b) for a, b in data]
        solve_head(model, given, loss_fn=functional.binary_cross_entropy_with_logits)
        heads.append(model.state_dict()["layer.weight"])
    torch.testing.assert_close(heads[0], heads[1])
    assert heads[0][0, 0] > 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda out, _: out.mean(dim=1),
        lambda out, _: 2 * out[:, 0],
        lambda out, _: out.transpose(1, 2),
        lambda out, _: out.mul_(2.0)[:, 0],
        lambda out, _: out.add_(1.0).view(-1, 3),
    ],
)
def test_scores_that_are_computed_from_the_output_are_not_the_layers(change: Change) -> None:
    torch.manual_seed(0)
    targets = torch.zeros(BATCH).long()
    with pytest.raises(TrainingError, match="no linear layer put out"):
        head_sums(Ends(nn.Linear(FEATURES, 3), change), [(padded() + 1.0, targets)])


def test_a_row_is_not_guessed_where_several_rows_are_equal() -> None:
    torch.manual_seed(0)
    model = Ends(nn.Linear(FEATURES, 3), last_token)
    nn.init.zeros_(model.state_dict()["layer.weight"])
    with pytest.raises(TrainingError, match="no linear layer put out"):
        head_sums(model, [(padded(), torch.zeros(BATCH).long())])
