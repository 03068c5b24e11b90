"""Changes that a fit made to each tensor, and the part of each tensor that it trained."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import DivergedError, TrainingError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.torch_private import NormWithStatistics, own_buffers
from fl_elastic.planning import Plan
from fl_elastic.planning.step_transform import Part
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role, Weights, array_of
from fl_elastic.update.parts import Masks

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True, eq=False)
class Trained:
    """The tensors that a fit trained, and the weights that it started from.

    Attributes
    ----------
    before : mapping of str to array
        Weights at the start, by their names in the state.
    steps : Counter
        Steps by the first name of each tensor.
    plans : tuple of Plan
        Plans by which at least one step was taken.
    held : mapping of str to sequence of array
        Masks of the trained part of each tensor, see `StepOpener.held`.
    num_examples : int
        Number of examples in an epoch.
    stayed_here : tuple of str
        Parameters that the forward pass has changed and that do not travel.
    """

    before: Weights
    steps: Counter[str] = field(default_factory=Counter)
    plans: tuple[Plan, ...] = ()
    held: Mapping[str, Sequence[NDArray[np.bool_]]] = field(default_factory=dict)
    num_examples: int = 0
    stayed_here: tuple[str, ...] = ()

    def update(self, model: nn.Module, manifest: Manifest, base_version: int) -> PartialUpdate:
        """Return the changes as an update for the server.

        Raises
        ------
        TrainingError
            If the forward pass has changed a tensor that does not travel.
        DivergedError
            If a weight is no longer finite.
        """
        if self.stayed_here:
            raise TrainingError(
                f"parameter {self.stayed_here[0]!r} requires no gradient and was changed by the forward pass, like "
                "that of a moving average: it belongs to the frozen base, which is in no update. Begin with "
                "fl_elastic.flower.initial_arrays(model, whole=True), or make it a buffer"
            )
        _warn_of_integer_buffers(model, manifest, self.before)
        steps = under_every_name(model, self.steps)
        deltas = changes(model, manifest, self.before, steps)
        parts = trained_parts(self.plans, model, self.held)
        return PartialUpdate(
            deltas=deltas,
            steps={name: steps[name] for name in deltas},
            num_examples=self.num_examples,
            base_version=base_version,
            parts={n: part for n, part in parts.items() if n in deltas},
        )


def _warn_of_integer_buffers(model: nn.Module, manifest: Manifest, before: Weights) -> None:
    """Warn if training has changed an integer buffer, such as a flag that a layer is initialised.

    The batch counter of a norm is ignored unless the norm has no momentum, because only then is it used.
    """
    state, unused = ModelState.of(model).tensors, set[int]()
    for module in model.modules():
        if isinstance(module, NormWithStatistics) and getattr(module, "momentum", 1.0) is not None:
            unused |= set(map(id, own_buffers(module).values()))
    for name in manifest.names:
        own = manifest.role(name) is Role.COUNTER and id(state[name]) not in unused
        if own and name in before and not np.array_equal(before[name], array_of(state[name])):
            _LOG.warning(
                "training has changed the integer buffer %r, which no update contains: under PartialUpdates the "
                "next round begins with the server's value again. Make it float32 if the model depends on it", name,
            )  # fmt: skip
            break


def changes(
    model: nn.Module, manifest: Manifest, before: Weights, steps: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    """Return the change of each tensor that was trained for at least one step, in the order of the manifest.

    The tensors are compared one at a time: a copy of all would take as much memory as the trained tensors.

    Raises
    ------
    DivergedError
        If a trained tensor is no longer finite.
    """
    deltas, state = {}, ModelState.of(model).tensors
    for name in manifest.names:
        if steps.get(name, 0) > 0:
            value = array_of(state[name])
            deltas[name] = np.asarray(np.subtract(value, before[name], out=value))
            if not np.isfinite(deltas[name]).all():
                raise DivergedError(
                    f"tensor {name!r} is no longer finite after training: lower the learning rate"
                )
    return deltas


def trained_parts(
    plans: Iterable[Plan],
    model: nn.Module,
    held: Mapping[str, Sequence[NDArray[np.bool_]]] | None = None,
) -> dict[str, Masks]:
    """Return the trained part of each tensor that no plan trained whole, as one mask per axis.

    A part is the union over the plans' channels and windows, or the smallest set of rows and columns that holds it.
    Training by channels trains the whole bias, whose gradient needs no activations and so is exact for every
    channel. Training by neurons or in a window trains the same part of the bias as of the weight.

    Parameters
    ----------
    plans : iterable of Plan
        Plans by which at least one step was taken.
    model : nn.Module
        The model that was trained.
    held : mapping of str to sequence of array, optional
        Masks of the trained part of each tensor, see `StepOpener.held`.

    Examples
    --------
    >>> group = TensorGroup("0", ("0.weight", "0.bias"), ((2, 3), (2,)), "linear")
    >>> from fl_elastic.planning.lean_layers import LeanLayers
    >>> layers = LeanLayers(channels={"0": (1,)})
    >>> plan = Plan("test", (group,), (Mode.channels(1 / 3),), 1, 1, 1, 1, 1, transforms=(layers,))
    >>> trained_parts([plan], nn.Sequential(nn.Linear(3, 2)))
    {'0.weight': (None, array([False,  True, False]))}
    """
    sides: dict[str, list[NDArray[np.bool_]]] = {}
    dims: dict[str, int] = {}
    for plan in plans:
        opened = any(transform.opens_steps for transform in plan.transforms)
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in mode.trains(group):
                weight = model.get_parameter(name)
                both = list(_rows_and_columns(name, plan, group, mode, model))
                steps_held = (held or {}).get(name) if opened else None
                if steps_held is not None:
                    both[: len(steps_held[:2])] = steps_held[:2]
                dims[name] = weight.dim()
                before = sides.get(name, both)
                sides[name] = [one | other for one, other in zip(before, both, strict=True)]
    partly = {n: ends for n, ends in sides.items() if not all(end.all() for end in ends)}
    if not partly:
        return {}
    found: dict[str, Masks] = {}
    names = ModelState.of(model).by_module_name
    for name, ends in partly.items():
        masks = tuple(None if end.all() else end for end in ends)
        part = (*masks, *(None,) * dims[name])[: dims[name]]
        found |= dict.fromkeys(names[name], part)
    return found


def _rows_and_columns(
    name: str, plan: Plan, group: TensorGroup, mode: Mode, model: nn.Module
) -> Part:
    """Return which indices of a weight's first and second axis a plan trains."""
    for transform in plan.transforms:
        part = transform.trained_part(name, group, mode, model)
        if part is not None:
            return part
    # A vector counts as one column.
    shape = (*model.get_parameter(name).shape, 1, 1)
    return np.ones(shape[0], dtype=np.bool_), np.ones(shape[1], dtype=np.bool_)


def under_every_name(model: nn.Module, counts: Counter[str]) -> Counter[str]:
    """Return the counts under every name in the state: tied tensors, and layers used twice, have several names.

    Parameters
    ----------
    model : nn.Module
        The model that has these tensors.
    counts : Counter
        By the first name of each tensor in ``named_parameters()`` or ``named_buffers()``.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> sorted(under_every_name(nn.Sequential(layer, layer), Counter({"0.weight": 3})).items())
    [('0.weight', 3), ('1.weight', 3)]
    """
    names = ModelState.of(model).by_module_name
    return Counter({name: counts[first] for first in counts for name in names[first]})
