"""Conformance checks of poolings: the guarantees on which a head that reads through a pooling relies."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.readout.poolings import Pooling
from fl_elastic.testing.subjects import Check, require

# Shapes: vector, sequence, maps, tokens with and without a class token, token grids with channels last, maps of
# volumes, tiny ones.
_SHAPES = (
    (7,), (3, 40), (4, 12, 12), (16, 8), (17, 8), (6, 6, 8), (3, 9, 14), (2, 4, 5, 6), (1,),
    (2, 1), (5, 1, 1),
)  # fmt: skip
_SIZES = (0, 1, 2, 4, 20, 64)
_ODD_SHAPES = ((), (0,), (2, 3, 4, 5), (2, 3, 4, 5, 6))
_ODD_SIZES = (-1, 999)


def pooling_checks() -> list[Check]:
    """Return the checks of a pooling; each takes the class or the function and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.readout.poolings import GridPooling
    >>> for check in pooling_checks():
    ...     check(GridPooling)
    """
    return [
        check_some_shape_suits,
        check_what_does_not_suit_is_a_plan_error,
        check_each_example_has_a_row_of_numbers,
        check_equal_arguments_give_equal_rows,
        check_a_row_depends_on_its_example_alone,
        check_nothing_is_trained_or_kept_in_a_state,
        check_type_and_device_are_the_inputs,
        check_inputs_stay_and_gradients_flow,
        check_chance_is_left_alone,
        check_copies_give_the_same,
    ]


def check_some_shape_suits(subject: Pooling) -> None:
    """Check that rows, sequences, maps or tokens can be pooled with some size from 0 to 64."""
    require(any(True for _ in _suited(subject)), "no shape suits with any size")


def check_what_does_not_suit_is_a_plan_error(subject: Pooling) -> None:
    """Check that a shape or size that does not suit raises PlanError, and nothing else does."""
    pairs = [(shape, size) for shape in (*_SHAPES, *_ODD_SHAPES) for size in (*_SIZES, *_ODD_SIZES)]
    for shape, size in pairs:
        try:
            pooling = subject(shape, size)
        except PlanError:
            continue
        except Exception as error:
            raise AssertionError(
                f"shape {shape} and size {size} raise {error!r}, and no PlanError"
            ) from error
        found = pooling(_given(shape)) if 0 not in shape else torch.zeros(3, 1)
        require(found.ndim == 2, f"shape {shape} and size {size} are accepted, and give no rows")


def check_each_example_has_a_row_of_numbers(subject: Pooling) -> None:
    """Check that input (N, ...) gives finite numbers of shape (N, D), with the same D for every N."""
    for shape, pooling in _suited(subject):
        wide = {pooling(_given(shape, count)).shape[1:] for count in (1, 2, 5)}
        require(len(wide) == 1, f"the rows of shape {shape} differ in length: {wide}")
        found = pooling(_given(shape, 5))
        rows = found.ndim == 2 and len(found) == 5 and found.shape[1] > 0
        require(rows, f"{shape} gives {tuple(found.shape)}")
        require(bool(torch.isfinite(found).all()), f"numbers of shape {shape} are not finite")


def check_equal_arguments_give_equal_rows(subject: Pooling) -> None:
    """Check that random parts come from the pooling's own seed, so that two devices have the same features."""
    before = torch.get_rng_state()
    try:
        torch.manual_seed(1)
        found = [pooling(_given(shape)) for shape, pooling in _suited(subject)]
        torch.manual_seed(2)
        again = [pooling(_given(shape)) for shape, pooling in _suited(subject)]
    finally:
        torch.set_rng_state(before)
    same = all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    require(same, "equal arguments give other rows")


def check_a_row_depends_on_its_example_alone(subject: Pooling) -> None:
    """Check that a row does not depend on other examples in the batch, on the mode, or on earlier inputs."""
    for shape, pooling in _suited(subject):
        given = _given(shape)
        whole = pooling(given)
        pooling(_given(shape) * 9 - 1)
        for training in (True, False):
            pooling.train(training)
            for number in range(len(given)):
                alone = pooling(given[number : number + 1])[0]
                near = torch.allclose(alone, whole[number], rtol=1e-5, atol=1e-5)
                require(near, f"an example of shape {shape} has another row beside others")


def check_nothing_is_trained_or_kept_in_a_state(subject: Pooling) -> None:
    """Check that there are no parameters and no state: the place's name determines the pooling."""
    for shape, pooling in _suited(subject):
        require(not list(pooling.parameters()), f"pooling shape {shape} has parameters")
        kept = list(pooling.state_dict())
        require(
            not kept,
            f"pooling shape {shape} has {kept} in its state: register them as not persistent",
        )


def check_type_and_device_are_the_inputs(subject: Pooling) -> None:
    """Check that a moved pooling computes in the inputs' type and on their device."""
    for shape, pooling in _suited(subject):
        for kind in (torch.float64, torch.bfloat16):
            found = pooling.to(kind)(_given(shape).to(kind))
            require(found.dtype == kind, f"{kind} gives {found.dtype}")
        found = pooling.to("meta")(_given(shape).to("meta", torch.bfloat16))
        require(found.device.type == "meta", f"what is on another device gives {found.device}")


def check_inputs_stay_and_gradients_flow(subject: Pooling) -> None:
    """Check that no input is changed, and that gradients of the rows, if there are any, are finite."""
    for shape, pooling in _suited(subject):
        given = _given(shape).requires_grad_()
        before = given.detach().clone()
        found = pooling(given)
        require(torch.equal(given.detach(), before), f"an input of shape {shape} is changed")
        if found.requires_grad:
            (gradient,) = torch.autograd.grad(found.sum(), given)
            finite = bool(torch.isfinite(gradient).all())
            require(finite, f"gradients at an input of shape {shape} are not finite")


def check_chance_is_left_alone(subject: Pooling) -> None:
    """Check that making and using the pooling does not change the global random state."""
    before = torch.get_rng_state()
    for shape, pooling in _suited(subject):
        pooling(_given(shape))
    require(torch.equal(before, torch.get_rng_state()), "torch's random state has changed")


def check_copies_give_the_same(subject: Pooling) -> None:
    """Check that the pooling can be copied with its model, and that a copy pools in the same way."""
    for shape, pooling in _suited(subject):
        given = _given(shape)
        same = torch.equal(deepcopy(pooling)(given), pooling(given))
        require(same, f"a copy for shape {shape} differs")


def _suited(subject: Pooling) -> Iterator[tuple[tuple[int, ...], nn.Module]]:
    for shape in _SHAPES:
        for size in _SIZES:
            try:
                pooling = subject(shape, size)
            except PlanError:
                continue
            yield shape, pooling


def _given(shape: tuple[int, ...], count: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((5, *shape), generator=generator)[:count]
