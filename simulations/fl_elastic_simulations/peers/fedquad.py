"""Adapters of as many of the last blocks as a device can train, of which the deepest keep activations in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups.graph import BackwardGraph, Cut
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    requested_steps,
)
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.training import train_mask

__all__ = ["FedQuad", "Stretch", "in_bytes_between", "with_bytes"]

_LEVELS = 255
_LEAST_SCALE = 1e-8
# Smaller tensors are not worth a scale of their own.
_FEWEST = 256
_SHARE = 1 / 4


@register_peer("fedquad")
class FedQuad(Peer):
    """Train the adapters of the last blocks, and keep activations in bytes where memory is short.

    FedQuad (arXiv 2506.01001), "-style", after a summary of it: a depth counted from the output and a number of
    blocks with quantised activations for each device, both chosen greedily. Assumed: the depth is the largest that
    one round's steps have time for; then as few blocks as possible are quantised, the deepest first; where memory
    does not even hold that, the depth is less. Activations are rounded to one of 256 levels of their own tensor
    between the forward and the backward pass, really in a quarter of the bytes. Each layer is averaged over those
    who trained it. The time that rounding takes is not charged.
    """

    rule = "contributors"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the last blocks."""
        stretch = self._chosen(task)
        with in_bytes_between(task.model, *stretch.ends(task.profile.graph)):
            return train_mask(task, self.name, stretch.mask(task.profile))

    def rehearse(self, task: LocalTask) -> None:
        """Find depth and quantised blocks."""
        self._chosen(task)

    def _chosen(self, task: LocalTask) -> Stretch:
        seconds = task.allowed_seconds / requested_steps(task)
        return deepest(task.profile, seconds, task.memory_bytes)


@dataclass(frozen=True)
class Stretch:
    """Which blocks are trained, and which of them keep their activations in bytes.

    Attributes
    ----------
    groups : int
        Trained tensor groups, from the output on.
    kept_whole : int
        As many of them, from the output on, belong to blocks that keep their activations as they are.
    """

    groups: int
    kept_whole: int

    def mask(self, profile: CostProfile) -> Mask:
        """Return what is trained; shape (N,)."""
        trained: Mask = np.arange(len(profile)) < self.groups
        return trained

    def ends(self, graph: BackwardGraph) -> tuple[Cut | None, Cut | None, bool]:
        """Return where the blocks in bytes begin and end, None for the model's own ends, and if there are any."""
        cuts = {cut.groups_above: cut for cut in block_ends(graph)}
        return cuts.get(self.groups), cuts.get(self.kept_whole), self.kept_whole < self.groups


def deepest(profile: CostProfile, step_seconds: float, memory_bytes: float) -> Stretch:
    """Return the most blocks that a step has time and memory for, with as few as possible in bytes.

    One block at the least, if nothing fits with its activations in bytes.

    Examples
    --------
    >>> from fl_elastic.testing import made_up_profile
    >>> deepest(made_up_profile(groups=5), np.inf, np.inf)
    Stretch(groups=5, kept_whole=5)
    """
    bounds = sorted({0, len(profile), *(cut.groups_above for cut in block_ends(profile.graph))})
    best = Stretch(bounds[1], 0)
    for place, groups in enumerate(bounds[1:], start=1):
        mask = np.arange(len(profile)) < groups
        # One block is trained whatever it takes, in fewer steps.
        if place > 1 and profile.step_seconds(mask) > step_seconds * (1 + 1e-9):
            break
        for whole in bounds[place::-1]:
            found = Stretch(groups, whole)
            if mask_bytes(with_bytes(profile, found), mask) <= memory_bytes:
                best = found
                break
        else:
            break
    return best


def with_bytes(profile: CostProfile, stretch: Stretch) -> CostProfile:
    """Return the costs where the blocks in bytes keep a quarter of what they kept."""
    begin, end, some = stretch.ends(profile.graph)
    if not some:
        return profile
    share = np.ones(len(profile.graph.nodes))
    lowest = len(share) if begin is None else begin.node
    share[0 if end is None else end.node : lowest] = _SHARE
    saved = profile.saved
    if saved is not None:
        # A tensor that a trained block outside keeps as well stays as it is.
        most = np.zeros(len(saved.tensor_bytes))
        running = saved.nodes < lowest
        np.maximum.at(most, saved.tensors[running], share[saved.nodes[running]])
        saved = replace(saved, tensor_bytes=saved.tensor_bytes * np.where(most > 0, most, 1.0))
    return replace(profile, node_saved_bytes=profile.node_saved_bytes * share, saved=saved)


@dataclass(frozen=True, eq=False)
class _InBytes:
    """A tensor as one of 256 levels for each number."""

    levels: Tensor
    least: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> _InBytes:
        least = values.amin().float()
        scale = ((values.amax().float() - least) / _LEVELS).clamp(min=_LEAST_SCALE)
        levels = ((values.float() - least) / scale).round().to(torch.uint8)
        return cls(levels, least, scale, values.dtype)

    def values(self) -> Tensor:
        return (self.levels * self.scale + self.least).to(self.dtype)


@contextmanager
def in_bytes_between(
    model: nn.Module, begin: Cut | None, end: Cut | None, some: bool = True
) -> Iterator[None]:
    """Keep activations between two places of the model in bytes, from the forward pass to the backward pass.

    What is made of them in the forward pass is as ever. Parameters, buffers, and tensors of few numbers or of other
    types than floating point are kept as they are.

    Parameters
    ----------
    model : nn.Module
        Inside the block; it is as before behind it.
    begin, end : Cut or None
        Places; None for where the model begins and ends.
    some : bool
        Nothing is done if false.
    """
    if not some:
        yield
        return
    inside = [False]

    def at(place: Cut | None, value: bool) -> None:
        def turn(*_: object) -> None:
            inside[0] = value

        module = model if place is None else model.get_submodule(place.module)
        before = value if place is None else place.at_input
        handle = (
            module.register_forward_pre_hook(turn) if before else module.register_forward_hook(turn)
        )
        stack.callback(handle.remove)

    def pack(tensor: Tensor) -> Tensor | _InBytes:
        small = tensor.numel() < _FEWEST or not tensor.is_floating_point()
        own = tensor.untyped_storage().data_ptr() in held
        return tensor if small or own or not inside[0] else _InBytes.of(tensor.detach())

    def unpack(kept: Tensor | _InBytes) -> Tensor:
        return kept.values() if isinstance(kept, _InBytes) else kept

    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        at(begin, True)
        at(end, False)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield
