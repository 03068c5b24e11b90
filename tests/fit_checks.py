"""What must hold of any fit of any model: the slow obvious reference, and everything left as it was."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_elastic.planning import Plan
from fl_elastic.update import Manifest

LossFn = Callable[[Any, Any], Tensor]
Modes = Mapping[str, bool]


@dataclass(frozen=True)
class Reference:
    """What plain torch makes of the same plans on the same batches.

    Attributes
    ----------
    weights : mapping of str to Tensor
        State of the model afterwards.
    steps : mapping of str to int
        Steps that gave a parameter a gradient, or in whose block a float buffer was written; absent for none.
    losses : tuple of float
        One a step.
    moved : mapping of str to int
        Steps in which a float buffer moved; absent for none.
    """

    weights: dict[str, Tensor]
    steps: dict[str, int]
    losses: tuple[float, ...]
    moved: dict[str, int]

    def miscounted(self, counted: Mapping[str, int]) -> list[str]:
        """Return the names whose count is wrong: a buffer's lies between its moves and the steps by those plans."""
        return [
            name
            for name in sorted({*self.steps, *counted})
            if not self.moved.get(name, self.steps.get(name, 0))
            <= counted.get(name, 0)
            <= self.steps.get(name, 0)
        ]


def trained_by_plans(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer_fn: Any,
    plans: Sequence[tuple[int, Plan]],
    steps: int,
    batches: Sequence[Any],
    modes: Sequence[Modes] = (),
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Reference:
    """Train ``model`` in place, one step a batch, with ``requires_grad`` as the plan of each step says.

    Parameters
    ----------
    model : nn.Module
        A copy of what the trainer was given.
    loss_fn, optimizer_fn
        The same.
    plans : sequence of (int, Plan)
        Each with its first step.
    steps : int
        All.
    batches : sequence
        Of one epoch; they come again and again.
    modes : sequence of mapping
        Training mode of every module in each step, where it is not what freezing alone makes of it.
    loss_of : callable, optional
        How a plain loop writes the loss of a model on a batch; left out, of a tensor and its targets.
    """
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    # What travels is the model's, whatever a plan freezes for a while.
    travelling = Manifest.of(model).index
    before_modes = {name: module.training for name, module in model.named_modules()}
    optimizer = optimizer_fn([p for p in model.parameters() if p.requires_grad])
    counts: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    losses = []
    ends = [*(start for start, _ in plans[1:]), steps]
    for (start, plan), end in zip(plans, ends, strict=True):
        trained = set(plan.trained_parameters)
        floats, unwritten = _float_buffers(model, travelling), _written(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        frozen = _frozen_norms(model, trained)
        for step in range(start, end):
            for name, module in model.named_modules():
                module.training = before_modes[name] and name not in frozen
                if modes:
                    module.training = modes[step][name]
            batch = copy.deepcopy(batches[step % len(batches)])
            before = _float_buffers(model, travelling)
            optimizer.zero_grad(set_to_none=True)
            for parameter in model.parameters():
                parameter.grad = None
            loss = loss_of(model, batch) if loss_of else loss_fn(model(batch[0]), batch[1])
            losses.append(loss.item())
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            counts.update(n for n, p in model.named_parameters() if p.grad is not None)
            after = _float_buffers(model, travelling)
            moves.update(n for n, value in after.items() if not torch.equal(value, before[n]))
        now, written = _float_buffers(model, travelling), _written(model)
        counts.update(
            {
                n: end - start
                for n, value in now.items()
                if written[n] != unwritten[n] or not torch.equal(value, floats[n])
            }
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags[name])
    state = model.state_dict().items()
    weights = {name: each.detach().clone() for name, each in state if isinstance(each, Tensor)}
    return Reference(weights, {n: c for n, c in counts.items() if c}, tuple(losses), dict(moves))


def _frozen_norms(model: nn.Module, trained: set[str]) -> set[str]:
    """Return torch's norms of which no own parameter is trained, though there are some."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            own = [f"{name}.{each}" if name else each for each, _ in module.named_parameters()]
            if own and not trained & set(own):
                found.add(name)
    return found


def _float_buffers(model: nn.Module, known: Collection[str]) -> dict[str, Tensor]:
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if name in known and buffer.is_floating_point()
    }


def _written(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return what differs once a buffer was written or replaced, even by the same numbers."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def far_apart(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float, skip: set[str]
) -> dict[str, float]:
    """Return the relative difference of tensors that differ by more than ``tolerance``."""
    found = {}
    for name, value in one.items():
        if name in skip:
            continue
        a, b = value.double(), other[name].double()
        scale = max(float(b.abs().max()), 1e-2) if b.numel() else 1.0
        gap = float((a - b).abs().max()) / scale if b.numel() else 0.0
        if not gap <= tolerance:
            found[name] = gap
    return found


class Surroundings:
    """Flags, modes, forwards, hooks and generators as they stand; `changed` says what is not as it was.

    Parameters
    ----------
    model : nn.Module
        Looked at, not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then = self._now()

    def _now(self) -> dict[str, Any]:
        model = self._model
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return {
            "flags": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "attributes": [sorted(set(vars(m)) & {"forward", "train"}) for m in model.modules()],
            "hooks": [[len(getattr(m, hook)) for hook in hooks] for m in model.modules()],
            "classes": [type(m) for m in model.modules()],
            "buffers": [list(m._buffers) for m in model.modules()],
            "momentum": [getattr(m, "momentum", None) for m in model.modules()],
            "tensors": [id(p) for p in model.parameters()],
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
            "threads": torch.get_num_threads(),
            "grad mode": torch.is_grad_enabled(),
        }

    def changed(self) -> list[str]:
        """Return the names of what differs."""
        now = self._now()
        return [name for name, value in self._then.items() if now[name] != value]


class Breaks:
    """A loader that fails in the middle once it is armed, from the second reading on.

    Parameters
    ----------
    batches : list
        What it gives.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.armed = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if self.armed and index == len(self.batches) - 1:
                raise OSError("disk")
            yield copy.deepcopy(batch)


def same(one: Any, other: Any) -> bool:
    """Whether two states of an optimiser are equal bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
