"""Create the optimiser of a model, and optimisers of the same kind for other tensors."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.torch_private import has_hooks, steps_alone, without_new_hooks

OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""``optimizer_fn(parameters)``, or ``optimizer_fn(named_parameters)`` for pairs of name and parameter."""

_NAMED = "named_parameters"
_SHOWN = 3


def made_by(
    optimizer_fn: OptimizerFn, model: nn.Module, *, kept: bool = False
) -> torch.optim.Optimizer:
    """Return the optimiser of a model's trainable parameters.

    Hooks that ``optimizer_fn`` registers on gradients are removed unless the optimiser is ``kept``: optimisers for
    estimates of costs are not.

    Raises
    ------
    TrainingError
        If ``optimizer_fn`` returns something else, an optimiser whose step needs a closure, or one that leaves out
        trainable parameters, which a plan could then not train.

    Examples
    --------
    >>> def optimizer_fn(named_parameters):
    ...     pairs = list(named_parameters)
    ...     head = [pair for pair in pairs if pair[0].startswith("1.")]
    ...     rest = [pair for pair in pairs if not pair[0].startswith("1.")]
    ...     return torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": rest}], lr=0.01)
    >>> made = made_by(optimizer_fn, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> [group["lr"] for group in made.param_groups]
    [0.1, 0.01]
    """
    check_callable(optimizer_fn)
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    given: Any = named if _wants_names(optimizer_fn) else [parameter for _, parameter in named]
    with nullcontext() if kept else without_new_hooks([parameter for _, parameter in named]):
        made: object = optimizer_fn(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainingError(
            f"optimizer_fn returned {type(made).__name__}: it must return a torch.optim.Optimizer "
            "over the parameters that it is given"
        )
    if not isinstance(getattr(made, "param_groups", None), list):
        raise TrainingError(
            f"{type(made).__name__} has no param_groups: an optimiser that wraps another needs those of the one "
            "inside, as a property"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _needs_closure(made)
    missing = undriven(made, model)
    if missing:
        few = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        lacks = "updates none of" if len(missing) == len(named) else "does not update"
        raise TrainingError(
            f"{type(made).__name__} {lacks} {few}: it needs all the parameters that optimizer_fn gets; set "
            "requires_grad=False on those that must not change"
        )
    return made


class KeptOptimizer:
    """Returns the optimiser when called; the first call makes it.

    It is an object of its own, because a bound method of the trainer would create a reference cycle and keep
    weights and optimiser state in memory until the next garbage collection.

    Parameters
    ----------
    model : Module
        Its trainable parameters are optimised.
    optimizer_fn : callable
        Makes the optimiser.

    Attributes
    ----------
    made : Optimizer or None
        The optimiser, None before the first call.
    """

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn) -> None:
        self.made: torch.optim.Optimizer | None = None
        self._model, self._optimizer_fn = model, optimizer_fn

    def follow(self) -> None:
        """Make a new optimiser if the present one lacks a parameter that is now trainable; keep the others' state.

        Raises
        ------
        TrainingError
            As `made_by` does.
        """
        before = self.made
        if before is None or not (undriven(before, self._model)):
            return
        self.made = made = made_by(self._optimizer_fn, self._model, kept=True)
        if made is before:
            return
        driven = {parameter for group in made.param_groups for parameter in group["params"]}
        made.state.update(
            {parameter: known for parameter, known in before.state.items() if parameter in driven}
        )
        if len(made.param_groups) == len(before.param_groups):
            for group, known in zip(made.param_groups, before.param_groups, strict=True):
                group.update({n: v for n, v in known.items() if n not in ("params", "param_names")})

    @property
    def state_bytes(self) -> float:
        """Bytes of the state that the optimiser holds for its parameters."""
        return 0.0 if self.made is None else state_bytes(self.made)

    def begin_anew(self) -> bool:
        """Reset the state of all parameters, but keep the settings; return whether that was possible."""
        before = self.made
        made = made_by(self._optimizer_fn, self._model)
        if before is None or made is before or not moves_by_gradient(before):
            return False
        # Some optimisers create their state in their constructor.
        before.state.clear()
        before.state.update(made.state)
        return True

    def __call__(self) -> torch.optim.Optimizer:
        """Return the optimiser; raise TrainingError as `made_by` does."""
        if self.made is None:
            self.made = made_by(self._optimizer_fn, self._model, kept=True)
        return self.made


def _needs_closure(optimizer: torch.optim.Optimizer) -> TrainingError:
    return TrainingError(
        f"{type(optimizer).__name__} evaluates the loss several times a step, which a plan cannot price: "
        "use an optimiser whose step needs no closure, such as SGD or Adam"
    )


@contextmanager
def refusing_closures(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise TrainingError if an optimiser's step inside the block fails because it needs a closure."""
    try:
        yield
    except Exception as error:
        if "closure" in f"{type(error).__name__} {error}".lower():
            raise _needs_closure(optimizer) from error
        raise


def undriven(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the names of a model's trainable parameters that an optimiser does not update."""
    driven = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = model.named_parameters()
    return [
        name for name, parameter in named if parameter.requires_grad and id(parameter) not in driven
    ]


def check_callable(optimizer_fn: object) -> None:
    """Raise TrainingError for anything that cannot be called, such as an optimiser instead of its factory."""
    if not callable(optimizer_fn):
        raise TrainingError(
            f"optimizer_fn of type {type(optimizer_fn).__name__} cannot be called: give a function, such as "
            "lambda p: torch.optim.SGD(p, lr=0.1)"
        )


def _wants_names(optimizer_fn: OptimizerFn) -> bool:
    try:
        return next(iter(inspect.signature(optimizer_fn).parameters), "") == _NAMED
    except (TypeError, ValueError):
        # A built-in function without a signature; torch's optimisers have one.
        return False


def adds_noise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser is from Opacus, which adds noise so that updates reveal little of the data."""
    return any(type(each).__module__.partition(".")[0] == "opacus" for each in parts_of(optimizer))


def moves_by_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser is known not to move parameters without a gradient.

    Torch's own optimisers do not. Others may treat a missing gradient as zeros, so that momentum and decay move
    frozen parameters, or may follow other rules.

    Examples
    --------
    >>> moves_by_gradient(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    True
    """
    return type(optimizer).__module__.startswith("torch.optim.") and steps_alone(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of an optimiser's state, without scalars such as counts of steps."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return float(sum(v.nbytes for v in values if isinstance(v, Tensor) and v.numel() > 1))


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimiser and those that it wraps, at any depth."""
    found = [optimizer]
    for each in found:
        inner = [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
        found += [one for one in inner if not any(one is known for known in found)]
    return found


def shadow_of(
    optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]
) -> torch.optim.Optimizer:
    """Return a copy of an optimiser, with its state, that updates other tensors.

    The copy has the same groups and settings but no hooks, because a schedule that uses hooks must only count real
    steps. The step of an optimiser that wraps another one may have side effects, such as accounting for privacy: it
    is replaced by plain SGD with its learning rates.

    Parameters
    ----------
    optimizer : Optimizer
        The optimiser to copy; it is not changed.
    pairs : iterable of (Tensor, Tensor)
        Pairs of a tensor that the optimiser updates and its replacement.
    """
    # deepcopy replaces these tensors wherever they occur: in groups, state and all other attributes.
    memo: dict[int, Any] = {id(own): other for own, other in pairs}
    if not _is_built(optimizer):
        groups = [
            {"params": [memo[id(p)] for p in group["params"] if id(p) in memo], "lr": group["lr"]}
            for group in optimizer.param_groups
            if "lr" in group
        ]
        return torch.optim.SGD([group for group in groups if group["params"]] or [*memo.values()])
    shadow = memo[id(optimizer)] = _empty(optimizer)
    shadow.__setstate__(deepcopy(_held(optimizer), memo))
    return shadow


def alike(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> torch.optim.Optimizer:
    """Return a new optimiser of the same kind over one weight, with the settings of its largest group.

    Raises
    ------
    TrainingError
        If the optimiser wraps another one.
    """
    if not _is_built(optimizer):
        raise TrainingError(
            f"{type(optimizer).__name__} wraps another optimiser, and cannot be made for a part of a weight: use "
            "the one inside, or another policy"
        )
    largest = max(
        optimizer.param_groups, key=lambda g: sum(parameter.numel() for parameter in g["params"])
    )
    settings = {name: value for name, value in largest.items() if name != "param_names"}
    fresh = _empty(optimizer)
    fresh.__setstate__(
        {
            **_held(optimizer),
            "state": defaultdict(dict),
            "param_groups": [{**settings, "params": [weight]}],
        }
    )
    return fresh


def _is_built(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser has groups and state of its own; one that only wraps another may have none.

    Others are not copied: ``__setstate__`` changes the class for the whole process, and torch then expects hooks in
    all its objects.
    """
    return has_hooks(optimizer) and len(parts_of(optimizer)) == 1


def _empty(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    kind = type(optimizer)
    return kind.__new__(kind)


def _held(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimiser, without hooks and without a schedule's wrapper of its step."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not name.startswith("_optimizer_")
    }
