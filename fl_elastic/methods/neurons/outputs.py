"""Outputs of neurons on a few inputs, normalised and sketched, and how much they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair, map_tensors
from fl_elastic.groups.forward import call_model, refusing_misfits
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.groups.untouched import untouched


def kept_inputs(batch: Batch, examples: int, most_bytes: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of a batch's first examples, at least one and as many as fit ``most_bytes``.

    Examples
    --------
    >>> batch = (torch.ones(8, 4), torch.zeros(8))
    >>> kept_inputs(batch, 16, 64)["0"].shape
    (4, 4)
    """
    while True:
        kept = {
            str(place): _as_array(leaf)
            for place, leaf in enumerate(_leaves(_first(batch, examples)))
        }
        if examples <= 1 or sum(array.nbytes for array in kept.values()) <= most_bytes:
            return kept
        examples = examples // 2


def with_kept(batch: Batch, kept: dict[str, NDArray[Any]]) -> Any:
    """Return the kept tensors in the form of the inputs of ``batch``; None if they do not fit this form."""
    inputs = _first(batch, len(kept) if _is_listed(batch) else 1)
    leaves = _leaves(inputs)
    if [leaf.dim() for leaf in leaves] != [array.ndim for array in kept.values()]:
        return None
    arrays = iter(kept.values())
    return map_tensors(
        lambda leaf: torch.tensor(next(arrays)).to(device=leaf.device, dtype=leaf.dtype), inputs
    )


def _is_listed(batch: Batch) -> bool:
    """Return whether inputs are a list of examples, as for detectors."""
    inputs, targets = as_pair(batch)
    return isinstance(inputs, (list, tuple)) and isinstance(targets, (list, tuple))


def _first(batch: Batch, examples: int) -> Any:
    inputs = as_pair(batch)[0]
    if _is_listed(batch):
        return inputs[:examples]
    return map_tensors(lambda leaf: leaf[:examples] if leaf.dim() else leaf, inputs)


def _leaves(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(leaf: Tensor) -> Tensor:
        found.append(leaf)
        return leaf

    map_tensors(note, inputs)
    return found


def _as_array(leaf: Tensor) -> NDArray[Any]:
    leaf = leaf.detach().cpu()
    return np.array((leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy())


Sketch = NDArray[np.float16]
_NEURONS = (nn.Conv2d, nn.Linear, BatchNorm, nn.GroupNorm)


def has_neurons(module: nn.Module) -> bool:
    """Return whether each output channel or feature of a layer has weights of its own."""
    return isinstance(module, _NEURONS)


def neuron_outputs(
    model: nn.Module, layers: Sequence[str], inputs: Any, width: int
) -> dict[str, Sketch]:
    """Return the outputs of each layer's neurons in eval mode as unit vectors, an array (N, C, K) per layer.

    A vector runs over the positions of one example; in layers with a single position, such as linear ones, over the
    examples. A vector of more than ``width`` numbers is projected onto ``width`` fixed random sign vectors. This
    preserves the squared distance of two vectors up to a relative error of ``sqrt(2 / width)``. The model is left
    unchanged.

    Parameters
    ----------
    model : nn.Module
        The model at its current weights.
    layers : sequence of str
        Modules that `has_neurons` accepts; one that runs several times, or never, is left out.
    inputs : any
        Inputs in the model's form.
    width : int
        Largest number K of entries per vector.

    Raises
    ------
    TrainingError
        If the inputs do not fit the model.
    """
    seen: dict[str, list[Sketch]] = {name: [] for name in layers}

    def listen(name: str) -> Any:
        return model.get_submodule(name).register_forward_hook(
            lambda module, _, output: seen[name].append(_sketch(_vectors(module, output), width))
        )

    handles = []
    try:
        handles += [listen(name) for name in layers]
        with untouched(model), torch.no_grad(), refusing_misfits((inputs, ())):
            model.eval()
            call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1}


def change_of(before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> NDArray[np.float64]:
    """Return one minus the mean cosine of each neuron's outputs before and now; shape (C,), layer after layer.

    Two zero vectors count as equal. A zero vector counts as orthogonal to any other, and so does a non-finite one.
    """
    return np.concatenate([_change(before[name], now[name]) for name in now] or [np.zeros(0)])


def _change(before: Sketch, now: Sketch) -> NDArray[np.float64]:
    one, other = before.astype(np.float32), now.astype(np.float32)
    # For unit vectors the cosine is one minus half of the squared distance, which a projection preserves.
    with np.errstate(invalid="ignore"):
        change = np.square(one - other).sum(axis=2) / 2
    change[one.any(axis=2) != other.any(axis=2)] = 1.0
    change[~np.isfinite(change)] = 1.0
    means: NDArray[np.float64] = change.mean(axis=0, dtype=np.float64)
    return means


def _vectors(layer: nn.Module, output: Tensor) -> Tensor:
    """Return outputs as (N, C, P), or as (1, C, N) if there is only one position."""
    by_channel = output.movedim(-1, 1) if isinstance(layer, nn.Linear) else output
    flat = by_channel.float().flatten(2) if by_channel.dim() > 2 else by_channel.float()[..., None]
    return flat.permute(2, 1, 0) if flat.shape[2] == 1 else flat


def _sketch(vectors: Tensor, width: int) -> Sketch:
    norms = vectors.norm(dim=2, keepdim=True)
    unit = torch.where(norms > 0, vectors / norms, torch.zeros_like(vectors))
    positions = unit.shape[2]
    if positions > width:
        drawn = np.random.default_rng(positions).integers(0, 2, (positions, width))
        signs = torch.from_numpy((2 * drawn - 1).astype(np.float32) / np.sqrt(width, dtype="f4"))
        unit = unit @ signs.to(unit.device)
    sketch: Sketch = unit.half().cpu().numpy()
    return sketch
