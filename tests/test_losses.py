"""The classification loss, of one output or several, the first of which counts most; and outputs without labels."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_elastic.errors import ModelError
from fl_elastic.losses import classification_loss, squared_outputs

Outputs = namedtuple("Outputs", ["logits", "aux"])

main = torch.randn(5, 4)
aux = torch.randn(5, 4)
other = torch.randn(5, 4)
targets = torch.tensor([0, 3, 1, 1, 2])


def test_one_output_is_plain_cross_entropy() -> None:
    assert torch.equal(classification_loss(main, targets), cross_entropy(main, targets))


@pytest.mark.parametrize(
    "outputs",
    [
        (main, aux),
        [main, aux],
        Outputs(main, aux),
        OrderedDict(out=main, aux=aux),
        (main, None, aux),
        (main, aux, torch.randn(5, 4, 2)),
        (main, torch.randn(5, 16), aux),
    ],
    ids=["tuple", "list", "namedtuple", "dict", "with None", "with feature maps", "with features"],
)
def test_a_second_output_counts_less(outputs: Any) -> None:
    expected = cross_entropy(main, targets) + 0.3 * cross_entropy(aux, targets)
    assert torch.allclose(classification_loss(outputs, targets), expected)


def test_every_auxiliary_output_counts() -> None:
    expected = cross_entropy(main, targets) + 0.3 * (
        cross_entropy(aux, targets) + cross_entropy(other, targets)
    )
    assert torch.allclose(classification_loss((main, aux, other), targets), expected)


@pytest.mark.parametrize("outputs", [(), {}, [None], (torch.randn(5),), ("text",)])
def test_outputs_without_scores_are_explained(outputs: Any) -> None:
    with pytest.raises(ModelError, match="no class scores"):
        classification_loss(outputs, targets)


@pytest.mark.parametrize(
    "outputs",
    [
        main, (main, aux), [main], Outputs(main, aux), {"loss": aux.sum(), "out": main},
        {"loss": aux.sum(), "logits": main}, {"ids": targets, "out": main}, main.reshape(5, 2, 2),
    ],
)  # fmt: skip
def test_squared_outputs_are_of_the_main_output(outputs: Any) -> None:
    assert torch.allclose(squared_outputs(outputs, None), (main**2).sum() / 5)


def test_squared_outputs_may_be_one_number_for_each_example() -> None:
    assert torch.allclose(squared_outputs(main[:, 0], None), (main[:, 0] ** 2).mean())


@pytest.mark.parametrize("outputs", [(), {}, None, "text", targets, [{"boxes": main}]])
def test_outputs_without_floats_are_explained(outputs: Any) -> None:
    with pytest.raises(ModelError, match="no tensor of floats"):
        squared_outputs(outputs, None)
