"""New classes: the map from labels to outputs, and a head that grows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ModelError, StreamError
from fl_elastic.groups.untouched import preserved_rng

_SMALL = 0.01


@dataclass(frozen=True)
class ClassMap:
    """The labels of a stream in the order of first appearance; a label's index is its output.

    Parameters
    ----------
    labels : tuple of int
        Distinct labels.

    Examples
    --------
    >>> classes = ClassMap((7,)).with_label(3).with_label(7)
    >>> classes.labels, classes.outputs(np.array([3, 3, 7])).tolist(), classes.label(1)
    ((7, 3), [1, 1, 0], 3)
    """

    labels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.labels)) != len(self.labels):
            raise StreamError(f"the classes {self.labels} name a label twice: give each once")

    def __len__(self) -> int:
        return len(self.labels)

    def __contains__(self, label: object) -> bool:
        return label in self.labels

    def with_label(self, label: int) -> ClassMap:
        """Return a map with the label added; itself if it has the label already."""
        return self if label in self.labels else replace(self, labels=(*self.labels, int(label)))

    def outputs(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the output of each label; raise StreamError for an unknown label."""
        places = {label: place for place, label in enumerate(self.labels)}
        try:
            return np.array([places[label] for label in labels.tolist()], np.int64)
        except KeyError as error:
            raise StreamError(
                f"the label {error.args[0]} is not one of the {len(self)} classes that were seen"
            ) from None

    def label(self, output: int) -> int:
        """Return the label of an output."""
        return self.labels[output]


def head_name(model: nn.Module) -> str:
    """Return the name of the last linear layer, whose outputs are taken for class scores.

    Raises
    ------
    ModelError
        If the model contains no linear layer, or is one itself.
    """
    names: list[str] = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    if not names or not names[-1]:
        raise ModelError(
            "the model has no linear layer inside of it that could grow with new classes: end it with one"
        )
    return names[-1]


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the model's last linear layer; raise ModelError as `head_name` does."""
    layer = model.get_submodule(head_name(model))
    assert isinstance(layer, nn.Linear)
    return layer


def grow_head(model: nn.Module, name: str, outputs: int, seed: int) -> bool:
    """Replace a linear layer by one with more outputs; return whether this was needed.

    Old rows stay bit-identical. Each new row depends only on the seed and its index, so that growing by two equals
    growing twice by one. New rows are small (normal, standard deviation 0.01, zero bias), so that a new class has
    little influence until it is learned.

    Parameters
    ----------
    model : nn.Module
        Changed in place: the layer is a new module afterwards, with new parameters.
    name : str
        Name of the layer.
    outputs : int
        Number of outputs afterwards.
    seed : int
        Seed of the new rows.

    Raises
    ------
    ModelError
        If the layer is not linear, or its weight is shared with another one.
    """
    old = model.get_submodule(name)
    if not isinstance(old, nn.Linear):
        raise ModelError(f"{name!r} is a {type(old).__name__}: only a linear head can grow")
    if outputs <= old.out_features:
        return False
    users = sum(
        parameter is old.weight for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    if users > 1:
        raise ModelError(f"the weight of {name!r} is tied to another layer, so it cannot grow")
    weight = old.weight.detach()
    # The initial weights are overwritten; drawing them must not change the global random state.
    with preserved_rng():
        new = nn.Linear(
            old.in_features, outputs, bias=old.bias is not None,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
    with torch.no_grad():
        new.weight[: old.out_features] = weight
        for place in range(old.out_features, outputs):
            row = np.random.default_rng([seed, place]).normal(0.0, _SMALL, old.in_features)
            new.weight[place] = torch.from_numpy(row).to(weight)
        if old.bias is not None:
            new.bias.zero_()
            new.bias[: old.out_features] = old.bias.detach()
    new.requires_grad_(old.weight.requires_grad).train(old.training)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)
    return True
