"""What a plan does not train stays as it is: whole parameters, and the other channels of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.groups.torch_private import NormWithStatistics, spared_group_norms
from fl_elastic.groups.trainable import flags_kept, trainable
from fl_elastic.planning import Plan
from fl_elastic.profiling.optimizers import moves_by_gradient

__all__ = [
    "ChannelGuard",
    "StillThroughSteps",
    "erase_momentum",
    "frozen_outside",
    "frozen_parameters",
    "held_in_eval",
    "training_statistics",
]

# By the names that torch's optimisers give them: which way a weight went.
_MOMENTA = ("momentum_buffer", "exp_avg")


@contextmanager
def frozen_outside(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Train only what ``plan`` trains inside the block.

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor
    that has a stale one. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. So does all that is frozen where a plan leaves tokens out, for what a
    block attends to must not change by chance. On leaving, also by an exception, flags and modes are as before.
    """
    trained = set(plan.trained_parameters)
    parameters = dict(model.named_parameters())
    with flags_kept(parameters.values()):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
            if name not in trained:
                parameter.grad = None
        held = _frozen_norms if plan.tokens is None else _frozen_modules
        with held_in_eval(model, held(model, trained)), spared_group_norms(model):
            yield


@contextmanager
def held_in_eval(model: nn.Module, norms: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Run norms with the statistics that they have, also after ``model.train()``; all modes are put back.

    Parameters
    ----------
    model : nn.Module
        Whose modes are put back.
    norms : sequence of nn.Module, optional
        Which; all of the model that have statistics, if left out.
    """
    modes = [(module, module.training) for module in model.modules()]
    if norms is None:
        norms = [each for each in model.modules() if isinstance(each, NormWithStatistics)]
    before = [(norm, norm.__dict__.get("train")) for norm in norms]
    for norm in norms:
        norm.eval()
        # An instance attribute shadows the method, so that model.train() passes this module by.
        norm.__dict__["train"] = _StaysInEval(norm)
    try:
        yield
    finally:
        for norm, shadow in before:
            norm.__dict__.pop("train", None)
            if shadow is not None:
                norm.__dict__["train"] = shadow
        for module, mode in modes:
            module.training = mode


class _StaysInEval:
    """Stands in for the ``train`` method of a norm."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __call__(self, mode: bool = True) -> nn.Module:
        del mode
        return self._norm


def _frozen_norms(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    norms: list[nn.Module] = []
    for prefix, module in model.named_modules():
        if isinstance(module, NormWithStatistics):
            own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
            if own and not any(name in trained for name in own):
                norms.append(module)
    return norms


def _frozen_modules(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    """Return the outermost modules that hold parameters, of which none is trained."""
    frozen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        if own and module not in inside and trained.isdisjoint(own):
            frozen.append(module)
            inside.update(module.modules())
    return frozen


def training_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics that a training step would update now."""
    names = []
    for prefix, module in model.named_modules():
        if (
            isinstance(module, NormWithStatistics)
            and module.training
            and module.track_running_stats
        ):
            names += [
                f"{prefix}.{name}" if prefix else name
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_floating_point()
            ]
    return names


@dataclass(frozen=True)
class _Kept:
    """Places of a parameter that stay: whole rows by number, or a mask of what trains."""

    weight: nn.Parameter
    values: Tensor
    rows: Tensor | None = None
    trained: Tensor | None = None

    def put_back(self, scratch: Tensor) -> None:
        if self.rows is not None:
            shape = (len(self.rows), *self.weight.shape[1:])
            rows = scratch[: math.prod(shape)].view(shape)
            torch.index_select(self.values, 0, self.rows, out=rows)
            self.weight.index_copy_(0, self.rows, rows)
        elif self.trained is not None:
            self.weight.copy_(torch.where(self.trained, self.weight, self.values))


class ChannelGuard:
    """Remembers the untrained channels of a plan and puts them back after each step.

    A zero gradient is not enough: momentum from an earlier plan and weight decay would move them.

    Parameters
    ----------
    plan : Plan
        Its ``channels`` say which are trained.
    model : nn.Module
        At the weights that stay.
    copies : mapping of str to array
        Copies of present weights that somebody else holds already, by name: they are not copied again.
    optimizer : torch optimiser, optional
        Whose momentum of untrained neurons is erased in the end, and the rest of whose state of them is what it is
        now.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._kept: list[_Kept] = []
        self._optimizer = optimizer
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in group.parameters if group.name in plan.channels else ():
                weight = model.get_parameter(name)
                if mode.trains_part_of(weight.shape):
                    held = None if copies is None else copies.get(name)
                    values = (
                        weight.detach().clone()
                        if held is None
                        else torch.as_tensor(held, device=weight.device, dtype=weight.dtype)
                    )
                    channels = plan.channels[group.name]
                    if mode.axis == "neuron":
                        self._kept.append(_Kept(weight, values, rows=_others(weight, channels)))
                    else:
                        layer = model.get_submodule(name.rpartition(".")[0])
                        trained = _trained(weight, mode, channels, layer)
                        self._kept.append(_Kept(weight, values, trained=trained))
        # Of several types, as with a head in another precision, each has its own.
        self._scratch: dict[torch.dtype, Tensor] = {}
        for kept in self._kept:
            numbers = 0 if kept.rows is None else len(kept.rows) * kept.weight[0].numel()
            longest = self._scratch.get(kept.weight.dtype)
            if longest is None or len(longest) < numbers:
                self._scratch[kept.weight.dtype] = kept.weight.detach().new_empty(numbers)
        self._states = {
            (id(weight), name): value.index_select(0, rows)
            for weight, rows, name, value in self._states_of_rows()
            if name not in _MOMENTA
        }

    def put_back(self) -> None:
        """Write the remembered channels into the weights."""
        with torch.no_grad():
            for kept in self._kept:
                kept.put_back(self._scratch[kept.weight.dtype])
            for weight, rows, name, value in self._states_of_rows():
                # Vectors have whole gradients: who reads the momentum of each step is not to find those.
                if weight.dim() == 1 and name in _MOMENTA:
                    value.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def settle(self) -> None:
        """Leave the optimiser's state of untrained neurons as it shall be; meanwhile it moves nothing."""
        for weight, rows, name, value in self._states_of_rows():
            before = self._states.get((id(weight), name))
            if before is None:
                # Momentum, or what the first step has made out of zeros.
                value.index_fill_(0, rows, 0.0)
            else:
                value.index_copy_(0, rows, before)

    def _states_of_rows(self) -> Iterator[tuple[nn.Parameter, Tensor, str, Tensor]]:
        """Yield what the optimiser holds of weights with untrained neurons: these rows, its name, and itself."""
        for weight, rows in [(k.weight, k.rows) for k in self._kept if k.rows is not None]:
            found = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
            for name, value in found.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    yield weight, rows, name, value


class StillThroughSteps:
    """Keeps what a plan does not train bit by bit as it is, through the steps of any optimiser.

    That it has no gradient keeps torch's own from moving it. Others may take that for zeros, so that momentum and
    decay move it, or move weights by rules of their own: then values are copied before each step and put back.

    Parameters
    ----------
    model : nn.Module
        In training.
    plan : Plan
        By which it trains.
    optimizer : torch optimiser
        Whose steps they are.

    Attributes
    ----------
    anything_moves : bool
        Whether a step may move what has no gradient.
    still : list of Parameter
        What is put back: of what the optimiser may know, so not a base that its owner has frozen.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(model.get_parameter(name)) for name in plan.trained_parameters}
        self.anything_moves = not moves_by_gradient(optimizer)
        driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.still = [
            each
            for each in (model.parameters() if self.anything_moves else ())
            if id(each) not in trained and (id(each) in driven or trainable(each))
        ]
        self._values: list[Tensor] = []
        self._within = 0

    @torch.no_grad()
    def remember(self) -> None:
        """Copy what is to stay, before a step; a step may take another one, as that of a class derived from it."""
        if not self._within:
            self._values = [each.detach().clone() for each in self.still]
        self._within += 1

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back what a step has moved."""
        for parameter, value in zip(self.still, self._values, strict=True):
            if not torch.equal(parameter, value):
                parameter.copy_(value)
            parameter.grad = None
        self._within -= 1
        if not self._within:
            self._values = []


def frozen_parameters(plan: Plan, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of which a plan trains nothing."""
    trained = set(plan.trained_parameters)
    return [model.get_parameter(n) for g in plan.groups for n in g.parameters if n not in trained]


@torch.no_grad()
def erase_momentum(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Set the optimiser's momentum of these parameters to zero, if it has any."""
    for parameter in parameters:
        for name, value in optimizer.state.get(parameter, {}).items():
            if name in _MOMENTA and isinstance(value, Tensor):
                value.zero_()


def _others(weight: nn.Parameter, channels: tuple[int, ...]) -> Tensor:
    """Return the rows of a weight that are not among the channels."""
    trained = torch.zeros(len(weight), dtype=torch.bool)
    trained[list(channels)] = True
    return torch.nonzero(~trained)[:, 0].to(weight.device)


def _trained(
    weight: nn.Parameter, mode: Mode, channels: tuple[int, ...], layer: nn.Module
) -> Tensor:
    """Return which rows and columns of a weight its channels train, broadcast over the kernel."""
    # Few plans train channels: others do not load how a layer is cut into them.
    from fl_elastic.ops.channels import ChannelSubset

    groups = int(getattr(layer, "groups", 1))
    subset = ChannelSubset.of(channels, mode.axis, weight.shape, groups)
    trained = torch.zeros(weight.shape[:2], dtype=torch.bool)
    rows, columns = (torch.arange(length) for length in weight.shape[:2])
    for block in subset.blocks:
        trained[rows[block.outputs].unsqueeze(1), columns[block.columns].unsqueeze(0)] = True
    return trained.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2)).to(weight.device)
