"""How models are called: tensors, tuples and dicts, whole or spread."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from small_models import chain, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import tensor_groups
from fl_elastic.groups.batch import map_tensors
from fl_elastic.groups.forward import batch_shape, call_model, compute_loss, to_device

Pair = namedtuple("Pair", ["a", "b"])

a, b = torch.randn(4, 3), torch.randn(4, 3)


class TakesTwo(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Subtract, so that the order matters."""
        out: Tensor = self.linear(a - 2 * b) * scale
        return out


class TakesWhole(nn.Module):
    """One input that is a container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Any) -> Tensor:
        """Subtract the container's two tensors."""
        first, second = (batch["a"], batch["b"]) if hasattr(batch, "keys") else batch
        out: Tensor = self.linear(first - 2 * second)
        return out


@pytest.mark.parametrize("model", [TakesTwo(), TakesWhole()], ids=["spread", "whole"])
@pytest.mark.parametrize(
    "inputs",
    [(a, b), [a, b], Pair(a, b), {"a": a, "b": b}, OrderedDict(b=b, a=a)],
    ids=["tuple", "list", "namedtuple", "dict", "ordered dict"],
)
def test_containers_are_spread_over_the_parameters_or_passed_whole(
    model: nn.Module, inputs: Any
) -> None:
    assert torch.equal(call_model(model, inputs), model.get_submodule("linear")(a - 2 * b))
    targets = torch.zeros(4, dtype=torch.long)
    groups = tensor_groups(model, loss_fn, (inputs, targets))
    assert [group.name for group in groups] == ["linear"]


def test_a_dict_may_leave_out_defaults_and_a_tuple_fill_them() -> None:
    model = TakesTwo()
    assert torch.equal(call_model(model, {"a": a, "b": b, "scale": 3.0}), model(a, b, 3.0))
    assert torch.equal(call_model(model, (a, b, 3.0)), model(a, b, 3.0))


def test_a_tensor_is_passed_as_it_is() -> None:
    model = chain()
    inputs = vectors()[0][0]
    assert torch.equal(call_model(model, inputs), model(inputs))


@pytest.mark.parametrize("inputs", [(a, b), {"a": a, "b": b}], ids=["tuple", "dict"])
def test_an_error_inside_the_model_is_not_mistaken_for_a_wrong_signature(inputs: Any) -> None:
    class Broken(TakesTwo):
        calls = 0

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            Broken.calls += 1
            raise TypeError("the model's own trouble with an argument")

    with pytest.raises(TypeError, match="own trouble"):
        call_model(Broken(), inputs)
    assert Broken.calls == 1


def test_batch_shape_is_that_of_the_first_tensor() -> None:
    assert batch_shape((a, None)) == (4, 3)
    assert batch_shape(({"text": "x", "a": b[:2]}, None)) == (2, 3)
    assert batch_shape(([[], (7, b)], None)) == (4, 3)
    assert batch_shape(("no tensor", a)) == ()
    unequal = torch.nested.nested_tensor([a[:3], a[:2]])
    assert batch_shape((unequal, a)) == (2,)


def test_containers_keep_their_type_when_tensors_are_mapped() -> None:
    value = {"x": [a, (b, "text")], "y": Pair(a, 3)}
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert torch.equal(mapped["x"][0], a + 1) and torch.equal(mapped["x"][1][0], b + 1)
    assert mapped["x"][1][1] == "text" and isinstance(mapped["x"][1], tuple)
    assert isinstance(mapped["y"], Pair) and mapped["y"].b == 3
    assert torch.equal(value["y"].a, a)  # type: ignore[attr-defined]


def test_batches_move_to_a_device() -> None:
    moved = to_device((a, {"t": b}), "meta")
    assert moved[0].device.type == moved[1]["t"].device.type == "meta"


@pytest.mark.parametrize(
    "batch",
    [
        (torch.randn(4, 5), torch.zeros(4, dtype=torch.long)),
        (torch.randn(4, 6), torch.zeros(3, dtype=torch.long)),
        (torch.randn(4, 6), torch.full((4,), 99)),
        (torch.randint(3, (4, 6)), torch.zeros(4, dtype=torch.long)),
        (torch.randn(4, 6), torch.zeros(4)),
    ],
    ids=["features", "target count", "class", "input dtype", "target dtype"],
)
def test_a_batch_that_does_not_fit_the_model_is_one_clear_line(batch: Any) -> None:
    with pytest.raises(TrainingError) as caught:
        compute_loss(chain(), loss_fn, batch)
    message = str(caught.value)
    assert "\n" not in message and str(tuple(batch[0].shape)) in message
    assert caught.value.__cause__ is not None


def test_running_out_of_memory_stays_what_it_is() -> None:
    def greedy(outputs: Tensor, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        compute_loss(chain(), greedy, vectors()[0])


class Particular(nn.Module):
    """Asserts that it is given a dict, as a detector asserts that it is given targets."""

    def __init__(self, asserts: bool) -> None:
        super().__init__()
        self.asserts, self.layer = asserts, nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        """Fail."""
        if self.asserts:
            assert isinstance(x, dict), "a dict of pictures is needed"
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    ("asserts", "inputs", "why"),
    [
        (True, torch.zeros(2, 4), "a dict of pictures is needed"),
        (
            False, {"image": torch.zeros(2, 4), "idx": torch.zeros(2)},
            r"inputs of shape \(2, 4\) in a dict of 'image', 'idx' and int64 targets",
        ),
        (False, (torch.zeros(2, 4), torch.zeros(2)), r"\(2, 4\) in a tuple of 2 \(of a batch of three"),
        (False, [torch.zeros(2, 4), torch.zeros(2, 4)], r"\(2, 4\) in a list of 2 and int64 targets"),
    ],
)  # fmt: skip
def test_how_a_batch_was_read_is_part_of_the_line(asserts: bool, inputs: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=why) as raised:
        compute_loss(Particular(asserts), loss_fn, (inputs, torch.zeros(2, dtype=torch.long)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("inputs", "targets", "why"),
    [
        (
            torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.long),
            r"with uint8 inputs of shape \(2, 4\) and int64 targets of shape \(2,\): ",
        ),
        (torch.zeros(2, 4), torch.zeros(2), r"float32 targets of shape \(2,\): "),
        (torch.zeros(2, 4), ["yes", "no"], "and targets of type list without a tensor: "),
        (np.zeros((2, 4)), torch.zeros(2), "with inputs of type ndarray without a tensor and"),
    ],
)  # fmt: skip
def test_a_misfit_names_types_as_well_as_shapes(inputs: Any, targets: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=why) as raised:
        compute_loss(nn.Linear(4, 3), loss_fn, (inputs, targets))
    assert "\n" not in str(raised.value)
