"""One pass over a client's data for the sums that the best linear head depends on; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch_size import counted
from fl_elastic.groups.examples import few_of
from fl_elastic.groups.forward import (
    all_finite,
    call_model,
    refusing_misfits,
    scores_of,
    split_batch,
    to_device,
)
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.pairs import as_pair
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.ops.inference import as_inference
from fl_elastic.profiling.profile_key import model_device
from fl_elastic.training.batches import NO_BATCH, within
from fl_elastic.update.closed_form import ClosedFormHead, closed_form_head
from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums

__all__ = [
    "as_numbers",
    "example_keys",
    "head_sums",
    "held_out",
    "put_head",
    "refuse_frozen_head",
    "solve_head",
]

_AT_ONCE = 256
_FOLDS = 5
# So many examples are held out in turn, or half as many as there are features: their rows are no more numbers than
# the products of all features.
_HELD_OUT = 320


def head_sums(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    seconds: float = float("inf"),
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    together: int = 1,
) -> HeadSums:
    """Return the sums over a loader of what enters the model's last linear layer, and of its targets.

    The model runs in eval mode without gradients; modes are put back. Up to five folds of the examples are summed
    apart, to be held out: equal inputs are in the same one, and the same examples are held out in every pass.

    Parameters
    ----------
    model : nn.Module
        Whose output, or its ``logits`` as of transformers, is that of a linear layer, of shape (N, C).
    loader : iterable of batches
        Targets are classes, shape (N,), or numbers, shape (N, C).
    seconds : float
        No batch is begun after that time; sums over some of the data are sums as well.
    running : callable, optional
        Gives the block in which the model runs on a batch; as it is, if left out.
    together : int
        About how many examples a fold has at least, unless it has all of them.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, or data are missing or not finite.

    Examples
    --------
    >>> found = head_sums(nn.Linear(2, 3), [(torch.ones(4, 2), torch.tensor([0, 1, 1, 2]))])
    >>> found.weight, found.num_examples, found.targets[-1].tolist()
    ('weight', 4, [1.0, 2.0, 1.0])
    """
    modes = [(module, module.training) for module in model.modules()]
    held = Attributes.of(model)
    seen: list[tuple[nn.Linear, Tensor, Tensor]] = []
    gathered = _Gathered()
    hooks = [
        module.register_forward_hook(lambda layer, given, out: seen.append((layer, given[0], out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    model.eval()
    try:
        with torch.no_grad(), ExitStack() as stack:
            lay_out: Callable[[Any], Any] | None = None
            for given, size in within(counted(loader), seconds):
                seen.clear()
                batch = to_device(as_pair(given), model_device(model))
                if size:
                    block = nullcontext() if running is None else running(batch)
                    with refusing_misfits(batch), block:
                        inputs, targets = split_batch(batch)
                        if running is None:
                            lay_out = lay_out or stack.enter_context(
                                as_inference(model, few_of((inputs, targets)))
                            )
                        laid = inputs if lay_out is None else lay_out(inputs)
                        outputs = call_model(model, laid, size)
                    layer, features, wanted, classes = _features_of(seen, outputs, targets)
                    gathered.add(layer, features, wanted, classes, example_keys(inputs, features))
    finally:
        for hook in hooks:
            hook.remove()
        held.put_back()
        for module, mode in modes:
            module.training = mode
    return gathered.sums(model, together)


def solve_head(
    model: nn.Module,
    loader: Iterable[Batch],
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
) -> tuple[ClosedFormHead, str]:
    """Put the head that a pass over the data gives in closed form into the model; return it and its weight's name.

    Parameters
    ----------
    model, loader, running
        See `head_sums`.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, or data are missing or not finite.

    Examples
    --------
    >>> model = nn.Linear(1, 2)
    >>> data = [(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1]))]
    >>> solve_head(model, data)[1], model(torch.tensor([[0.0], [3.0]])).argmax(1).tolist()
    ('weight', [0, 1])
    """
    sums = head_sums(model, loader, running=running)
    head = closed_form_head(sums, intercept=_layer_of(model, sums.weight).bias is not None)
    put_head(model, head, sums.weight)
    return head, sums.weight


def held_out(features: int) -> int:
    """Return how many examples are held out at most, where there are so many features."""
    return max(_HELD_OUT, features // 2)


def refuse_frozen_head(weight: str, names: Collection[str]) -> None:
    """Raise TrainingError unless the head's weight is one of the tensors that travel."""
    if weight not in names:
        raise TrainingError(
            f"the head {weight!r} belongs to the model's frozen base, so no server can solve for it: set its "
            "requires_grad, or use round_zero='none'"
        )


def put_head(model: nn.Module, head: ClosedFormHead, weight: str) -> None:
    """Write a head into the linear layer that has a weight of this name."""
    layer = _layer_of(model, weight)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        if layer.bias is not None:
            layer.bias.copy_(torch.from_numpy(head.bias))


def _layer_of(model: nn.Module, weight: str) -> nn.Linear:
    layer = model.get_submodule(ModelState.of(model).parameter_of(weight).rpartition(".")[0])
    assert isinstance(layer, nn.Linear)
    return layer


class _Gathered:
    """Adds up many examples at a time: for few, writing D x D numbers takes longer than the products."""

    def __init__(self) -> None:
        self._kind: tuple[nn.Linear, bool] | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        self._held = _HeldOut()

    def add(
        self, layer: nn.Linear, features: Tensor, wanted: Tensor, classes: bool, keys: Tensor
    ) -> None:
        """Take in a batch: what enters the layer, what should come out of it, and what tells examples apart."""
        if self._kind not in (None, (layer, classes)):
            raise TrainingError(
                "a head in closed form needs one last layer and one kind of target for all batches"
            )
        self._kind = layer, classes
        # Not every device knows double precision.
        self._waiting.append((features.cpu().double(), wanted, keys))
        if sum(len(each) for each, *_ in self._waiting) >= _AT_ONCE:
            self._add_up()

    def sums(self, model: nn.Module, together: int) -> HeadSums:
        """Return the sums over all batches; raises TrainingError if there was none."""
        if self._waiting:
            self._add_up()
        if self._sums is None or self._kind is None:
            raise TrainingError(NO_BATCH)
        names = ModelState.of(model).names
        layer, classes = self._kind
        own = {id(each) for each in model.parameters()} & names.keys()
        if not all(each is None or id(each) in own for each in (layer.weight, layer.bias)):
            raise TrainingError(
                "the last layer's weight or bias is computed from other parameters, as by weight_norm: a head in "
                "closed form has nowhere to go; take the parametrisation off, or train the head"
            )
        if not all(all_finite(each) for each in self._sums):
            raise TrainingError(
                "what enters the last layer, or a target, is not finite: check the data for NaN, and the "
                "learning rate"
            )
        products, targets, squares = (each.numpy() for each in self._sums)
        folds = self._held.folds(together)
        weight = names[id(layer.weight)][0]
        return HeadSums(weight, products, targets, squares, classes, folds)

    def _add_up(self) -> None:
        features, wanted, keys = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        rows = nn.functional.pad(features, (0, 1), value=1.0)
        found = rows.T @ rows, rows.T @ wanted, (wanted**2).sum(dim=0)
        self._waiting = []
        self._held.add(features, wanted, keys)
        before = self._sums
        self._sums = (
            found
            if before is None
            else (before[0] + found[0], before[1] + found[1], before[2] + found[2])
        )


class _HeldOut:
    """Keeps the examples of the smallest keys: the same in every pass, in any order, and equal ones together."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self._below: int | None = None

    def add(self, features: Tensor, wanted: Tensor, keys: Tensor) -> None:
        """Take in examples, of which those of large keys are dropped."""
        rows = features, wanted, keys
        if self._below is not None:
            rows = (
                features[keys < self._below],
                wanted[keys < self._below],
                keys[keys < self._below],
            )
        kept = (
            rows
            if self._kept is None
            else tuple(map(torch.cat, zip(self._kept, rows, strict=True)))
        )
        features, wanted, keys = kept
        most = held_out(features.shape[1])
        if len(keys) > most:
            self._below = int(keys.sort().values[most])
            some = keys < self._below
            features, wanted, keys = features[some], wanted[some], keys[some]
        self._kept = features, wanted, keys

    def folds(self, together: int) -> tuple[Fold, ...]:
        """Return up to five folds of about equal size, as many as have about so many examples, or one."""
        assert self._kept is not None
        features, wanted, keys = self._kept
        order = keys.argsort(stable=True)
        rows, goals = features[order].numpy(), wanted[order].numpy()
        counts = torch.unique_consecutive(keys[order], return_counts=True)[1]
        ends, parts = counts.cumsum(0).tolist(), max(min(_FOLDS, len(keys) // max(together, 1)), 1)
        # Each ends where equal examples do, next to where equal folds would end.
        wished = [len(keys) * number / parts for number in range(1, parts + 1)]
        bounds = sorted(
            {0, *(min(ends, key=lambda end: abs(end - wish)) for wish in wished if ends)}
        )
        return tuple(Fold.of(rows[i:j], goals[i:j]) for i, j in pairwise(bounds))


def example_keys(inputs: Any, features: Tensor) -> Tensor:
    """Return a number for each example, the same for equal inputs; of features where inputs are no rows."""
    try:
        found = sample_ids(inputs)
    except ModelError:
        found = []
    if len(found) != len(features):
        found = sample_ids(features)
    return torch.tensor([first for first, _ in found], dtype=torch.int64)


def _features_of(
    seen: list[tuple[nn.Linear, Tensor, Tensor]], outputs: Any, targets: Any
) -> tuple[nn.Linear, Tensor, Tensor, bool]:
    """Return the last linear layer, what entered it, and what should have come out."""
    scores = scores_of(outputs)
    heads = [(layer, given) for layer, given, out in seen if out is scores]
    if not heads or scores is None or scores.ndim != 2:
        shape = "no class scores" if scores is None else f"scores of shape {tuple(scores.shape)}"
        made = "" if heads else " that no linear layer put out"
        raise TrainingError(
            "a head in closed form needs a model whose output, or its 'logits', is that of a linear layer, of "
            f"shape (N, C); this one gives {type(outputs).__name__} with {shape}{made}: train it by "
            "ElasticTrainer, without such a head"
        )
    layer, features = heads[-1]
    return layer, features, *as_numbers(targets, scores)


def as_numbers(targets: Any, outputs: Tensor) -> tuple[Tensor, bool]:
    """Return targets as one number per output, and whether they are classes."""
    if isinstance(targets, Tensor) and len(targets) == len(outputs):
        if targets.is_floating_point() and targets.shape == outputs.shape:
            return targets.cpu().double(), False
        whole = not targets.is_floating_point() and targets.ndim == 1
        if whole and int(targets.min()) >= 0 and int(targets.max()) < outputs.shape[1]:
            return nn.functional.one_hot(targets.cpu().long(), outputs.shape[1]).double(), True
    shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
    raise TrainingError(
        f"a head in closed form needs classes of shape ({len(outputs)},) below {outputs.shape[1]}, or numbers of "
        f"shape {tuple(outputs.shape)}; targets are {shape}"
    )
