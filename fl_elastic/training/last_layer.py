"""A model's last linear layer: its inputs and its wanted outputs, one row of both per example.

A 1 x 1 convolution is a linear layer at every position of a map, and a linear layer on tokens is one at every
token: then each position or token is an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.batch import IGNORED
from fl_elastic.groups.forward import scores_of
from fl_elastic.groups.torch_private import version_of
from fl_elastic.readout.model_end import link_of

NOT_LINEAR = (
    "the last layer's output is not its weight times its input, plus its bias: a subclass of nn.Linear, a hook, an "
    "adapter or a quantiser changes it, which a head in closed form cannot take into account; end the model with a "
    "plain linear layer, or train it"
)
"""Error message for a last layer that is not a plain linear layer."""

COMPUTED = (
    "the last layer's weight or bias is computed from other parameters, as by weight_norm: a head in closed form "
    "cannot be written into it; remove the parametrisation, or train the head"
)
"""Error message for a last layer into which no head can be written."""

LastLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

# A larger head is that of a language model: its sums would be many times larger than an update.
_MOST_WEIGHTS = 1 << 24
# Rows of a batch on which it is tested that a layer is linear.
_TESTED = 4
# Largest difference from a linear layer that is rounding, as a share of the lengths of input and weight: in single
# precision, in one of a GPU's faster formats for it, and in machine precisions of a narrower type.
_EXACT, _FAST, _STEPS = 1e-5, 1e-2, 4


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a linear layer.

    Attributes
    ----------
    layer : nn.Module
        The layer.
    given, out : Tensor
        Input and output of the call; the model may change both in place afterwards.
    versions : tuple
        Torch's version counters of both right after the call; None for a tensor that has none.
    """

    layer: LastLayer
    given: Tensor
    out: Tensor
    versions: tuple[int | None, int | None]

    @classmethod
    def of(cls, layer: LastLayer, given: Tensor, out: Tensor) -> LayerCall:
        """Return the record of a call of the layer; make it before either tensor can be changed."""
        return cls(layer, given, out, (version_of(given), version_of(out)))

    @property
    def unchanged(self) -> bool:
        """Whether neither the input nor the output was changed since."""
        return (version_of(self.given), version_of(self.out)) == self.versions

    def is_whole(self, scores: object) -> bool:
        """Return whether the scores are the whole output, also in another shape or turned into probabilities."""
        if not (isinstance(scores, Tensor) and self.unchanged):
            return False
        axis = -1 if isinstance(self.layer, nn.Linear) else 1
        return scores is self.out or link_of(scores, self.out, axis) is not None

    def rows_of(self, scores: Tensor) -> slice | Tensor | None:
        """Return the rows of the output that the scores are: all, or one per example, as that of its last token.

        None if the scores are not rows of the output, or it is not clear which.
        """
        if self.is_whole(scores):
            return slice(None)
        return _one_of_each(scores, self.out, self.given) if self.unchanged else None

    @property
    def linear(self) -> bool:
        """Whether the output is the weight times the input, plus the bias; tested on a few rows.

        A subclass, a hook, an adapter or a quantiser may change the output.
        """
        weight = self.layer.weight.detach().flatten(1)
        given, out = (_flat(self.layer, tensor)[:_TESTED] for tensor in (self.given, self.out))
        if not weight.is_floating_point() or weight.shape != (out.shape[1], given.shape[1]):
            return False
        given = given.to(weight)
        plain = given @ weight.T
        size = given.norm(dim=1, keepdim=True) * weight.norm(dim=1)
        if self.layer.bias is not None:
            plain, size = plain + self.layer.bias, size + self.layer.bias.abs()
        return not bool(((plain - out).abs() > _rounding(self) * size).any())


def _one_of_each(scores: Tensor, out: Tensor, given: Tensor) -> Tensor | None:
    """Return the indices of the rows that equal the scores, one of each example; None if there are none.

    Equal rows of an example must have equal inputs, so that it does not matter which of them is returned.
    """
    if scores.ndim != 2 or out.ndim != 3 or scores.shape != (len(out), out.shape[2]):
        return None
    equal = (out == scores[:, None]).all(dim=2)
    first = equal.int().argmax(dim=1)
    rows = given[torch.arange(len(out), device=given.device), first]
    sure = ~equal | (given == rows[:, None]).all(dim=2)
    if not bool((equal.any(dim=1) & sure.all(dim=1)).all()):
        return None
    return first + torch.arange(len(out), device=first.device) * out.shape[1]


@contextmanager
def calls_of(layers: Iterable[nn.Module]) -> Iterator[list[LayerCall]]:
    """Within this context, add each call of these linear layers to a list."""
    seen: list[LayerCall] = []

    def note(layer: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        given = next(iter((*args, *named.values())), None)
        if isinstance(given, Tensor) and isinstance(out, Tensor):
            seen.append(LayerCall.of(layer, given, out))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, eq=False)
class LayerRows:
    """A batch as rows of the last linear layer.

    Attributes
    ----------
    layer : nn.Module
        The last linear layer.
    features : Tensor, shape (R, D)
        Inputs of the layer.
    wanted : Tensor, shape (R, C)
        Wanted outputs, in double precision: one-hot for classes, NaN for an ignored class, or numbers.
    classes : bool
        Whether targets are classes.
    inputs : Tensor, shape (R,)
        Index in the batch of each row's input.
    count : int
        Number of inputs in the batch.
    several : bool
        Whether an input has more than one row.
    places : slice or Tensor
        Which rows of the layer's output these are.
    alike : bool
        Whether the scores are the layer's unchanged output.
    """

    layer: LastLayer
    features: Tensor
    wanted: Tensor
    classes: bool
    inputs: Tensor
    count: int
    several: bool
    places: slice | Tensor
    alike: bool

    @property
    def may_be_shares(self) -> bool:
        """Whether all targets lie between 0 and 1, so that they may be shares."""
        return bool(((self.wanted >= 0) & (self.wanted <= 1)).all())

    @property
    def differ(self) -> bool:
        """Whether not all rows have the same target."""
        return bool((self.wanted != self.wanted[:1]).any())

    def replaced(self, scores: Tensor, out: Tensor) -> Tensor:
        """Return the layer's output with other scores, shape (R, C), in these rows."""
        rows = _flat(self.layer, out).clone()
        rows[self.places] = scores.to(rows)
        if isinstance(self.layer, nn.Linear):
            return rows.reshape(out.shape)
        return rows.reshape(out.movedim(1, -1).shape).movedim(-1, 1)

    def without_ignored(self) -> LayerRows:
        """Return the rows whose class is not ignored."""
        known = ~self.wanted.isnan().all(dim=1)
        return self if not self.classes or bool(known.all()) else self.where(known)

    def where(self, some: Tensor) -> LayerRows:
        """Return the rows selected by a mask of shape (R,)."""
        return replace(
            self, features=self.features[some.to(self.features.device)], wanted=self.wanted[some],
            inputs=self.inputs[some],
        )  # fmt: skip


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a convolution that is one at every position.

    Examples
    --------
    >>> [is_linear(each) for each in (nn.Linear(2, 3), nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 3))]
    [True, True, False]
    """
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    plain = {*module.kernel_size, *module.stride, module.groups} == {1}
    return plain and (module.padding == "same" or set(module.padding) <= {0, "valid"})


def rows_of(
    model: nn.Module,
    seen: list[LayerCall],
    outputs: Any,
    targets: Any,
    ignored: int = IGNORED,
) -> LayerRows:
    """Return a batch as rows: the inputs of the last linear layer, and the targets.

    Parameters
    ----------
    model : nn.Module
        The model that was run.
    seen : list of LayerCall
        Calls of linear layers.
    outputs, targets : any
        The model's outputs, and the batch's targets.
    ignored : int
        The class that the loss ignores.

    Raises
    ------
    TrainingError
        If the scores are not the output of a linear layer, the layer is too large or shares its weight with
        another one, or targets do not fit.
    """
    scores = scores_of(outputs)
    found = None if scores is None else _call_of(seen, scores)
    if found is None or scores is None:
        shape = "no class scores" if scores is None else f"scores of shape {tuple(scores.shape)}"
        made = "" if scores is None else " that no linear layer put out"
        raise TrainingError(
            "a head in closed form needs a model whose output, or its 'logits', is that of a linear layer, of "
            "shape (N, C), (N, T, C) or, of a 1 x 1 convolution, (N, C, H, W); this one gives "
            f"{type(outputs).__name__} with {shape}{made}: train it by ElasticTrainer, without such a head"
        )
    call, places = found
    layer = call.layer
    _refuse_unsuited(model, layer)
    if not call.linear:
        raise TrainingError(NOT_LINEAR)
    alike = call.out is scores
    # The class axis of the layer: scores in another shape may have it elsewhere, or not at all.
    axis = -1 if isinstance(layer, nn.Linear) else 1
    if scores.ndim < 2 or scores.shape[axis] != call.out.shape[axis]:
        if isinstance(targets, Tensor) and targets.shape == scores.shape:
            targets = targets.reshape(call.out.shape)
        scores = call.out
    wanted, classes = as_numbers(layer, targets, scores, ignored)
    count = len(scores)
    inputs = torch.arange(count).repeat_interleave(len(wanted) // count if count else 0)
    rows = _flat(layer, call.given)[places]
    return LayerRows(
        layer, rows, wanted, classes, inputs, count, several=scores.ndim > 2, places=places,
        alike=alike,
    )  # fmt: skip


def _call_of(seen: Sequence[LayerCall], scores: Tensor) -> tuple[LayerCall, slice | Tensor] | None:
    """Return the last call whose output contains the scores, and the rows of its output that they are."""
    for call in reversed(seen):
        places = call.rows_of(scores)
        if places is not None and call.out.ndim > 1:
            return call, places
    return None


def _rounding(call: LayerCall) -> float:
    """Return the largest relative difference from a linear layer that is rounding."""
    # Convolutions on a GPU use a faster format unless they are told not to.
    exact = isinstance(call.layer, nn.Linear) and torch.get_float32_matmul_precision() == "highest"
    narrow = max(
        torch.finfo(tensor.dtype).eps for tensor in (call.given, call.out, call.layer.weight)
    )
    return max(_EXACT if exact or not call.out.is_cuda else _FAST, _STEPS * narrow)


def _flat(layer: LastLayer, given: Tensor) -> Tensor:
    """Return a layer's input or output with one row per example."""
    last = given if isinstance(layer, nn.Linear) else given.movedim(1, -1)
    return last.reshape(-1, last.shape[-1])


def _refuse_unsuited(model: nn.Module, layer: LastLayer) -> None:
    weight = layer.weight
    users = [m for m in model.modules() if any(p is weight for p in m.parameters(recurse=False))]
    if len(users) > 1:
        raise TrainingError(
            "the last layer's weight is that of another layer as well, as in a language model: a head in closed "
            "form would change both; train it"
        )
    if weight.numel() > _MOST_WEIGHTS:
        raise TrainingError(
            f"the last layer has {weight.numel()} weights, and a head in closed form at most {_MOST_WEIGHTS}: "
            "its sums would be too large to send; train it"
        )


def as_numbers(
    layer: LastLayer | None, targets: Any, scores: Tensor, ignored: int = IGNORED
) -> tuple[Tensor, bool]:
    """Return targets as one number per output, NaN for the ignored class, and whether they are classes.

    Targets of a single output are numbers.
    """
    linear = layer is None or isinstance(layer, nn.Linear)
    outputs = scores.shape[-1 if linear else 1]
    places = scores.shape[:-1] if linear else (len(scores), *scores.shape[2:])
    said = ""
    if isinstance(targets, Tensor):
        if targets.shape == scores.shape:
            rows = targets if linear else targets.movedim(1, -1)
            return rows.cpu().reshape(-1, outputs).double(), False
        if outputs == 1 and targets.shape == places:
            # For a single output, as for yes or no, targets often lack the axis of outputs.
            return targets.cpu().reshape(-1, 1).double(), False
        if not targets.is_floating_point() and targets.shape == places:
            flat = targets.cpu().reshape(-1).long()
            known = flat != ignored
            if not known.any() or 0 <= int(flat[known].min()) <= int(flat[known].max()) < outputs:
                wanted = nn.functional.one_hot(flat.where(known, 0), outputs).double()
                wanted[~known] = torch.nan
                return wanted, True
            said = f", from {int(flat[known].min())} to {int(flat[known].max())}"
    given = type(targets).__name__
    if isinstance(targets, Tensor):
        given = f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"
    raise TrainingError(
        f"a head in closed form needs whole-numbered classes of shape {tuple(places)} below {outputs} "
        f"({ignored} is ignored), or numbers of shape {tuple(scores.shape)}; targets are {given}{said}"
    )
