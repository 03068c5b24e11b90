"""Memory that one step needs, with torch's own operations or lean ones, including the code that it loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import Block
from fl_elastic.profiling.kept_tensors import FLOAT, Kept, kept_by, node_table
from fl_elastic.profiling.profile import CostProfile, Mask, Seconds

CODE_BYTES = 24e6
"""Bytes of torch and its operations that a process on Linux loads or creates for its first steps: 13 to 26 MB."""
KERNEL_BYTES = 2.5e6
"""Bytes that a later fit loads in addition, for kinds of layers not trained before: 1.3 to 3.1 MB."""
_SMALL, _SLOPE = 2e6, 6.0

_has_trained = False


def code_to_load() -> float:
    """Return the bytes of code that this process has yet to load for training; fewer after its first step."""
    return KERNEL_BYTES if _has_trained else CODE_BYTES


def code_is_loaded() -> None:
    """Note that this process has taken a training step."""
    global _has_trained
    _has_trained = True


def with_code(tensors: float, code: float) -> float:
    """Return the bytes of tensors plus code; up to 2 MB of tensors no code is counted, from 6 MB on all of it.

    For small models code would outweigh everything else, and a budget would no longer limit the model's own memory.

    Examples
    --------
    >>> [with_code(1e6 * tensors, CODE_BYTES) / 1e6 for tensors in (1, 3, 50)]
    [1.0, 9.0, 74.0]
    >>> with_code(3e6, 0.0) / 1e6
    3.0
    """
    return tensors + min(max(_SLOPE * (tensors - _SMALL), 0.0), code)


# Bytes per number of two copies of each buffer: from before the fit, and from before the steps of the present plan.
_STATISTIC = 8


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one step keeps, and its peak.

    Attributes
    ----------
    activations : float
        Saved between forward and backward pass, including the largest of the recomputed blocks.
    gradients, optimizer : float
        Gradients and optimiser state of the trained parameters, as whole tensors: torch gives a parameter a
        gradient and a state of its full shape, even if only some channels are trained.
    largest_block : float
        The part of the activations that the largest recomputed block keeps while it runs again.
    copies : float
        Copies, made before training, of the trained parameters and of the buffers that move: the update is the
        difference from them, and a fit that fails restores them. State that an optimiser holds from earlier fits
        counts here.
    moment : float
        Peak of all temporary memory beyond that of inference: activations, which the backward pass frees step by
        step; gradients, which it creates; and tensors on their way between operations.
    code : float
        Code that the process has yet to load for training, see `CostProfile.code_bytes`.
    """

    activations: float
    gradients: float
    optimizer: float
    largest_block: float = 0.0
    copies: float = 0.0
    moment: float = 0.0
    code: float = 0.0

    @property
    def kept(self) -> float:
        """Activations, gradients and optimiser state, as if they all existed at the same time."""
        return self.activations + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Peak bytes of the step beyond weights and inference, which a memory budget limits."""
        return with_code(self.copies + self.optimizer + self.moment, self.code)


def step_memory(
    profile: CostProfile,
    modes: Sequence[Mode],
    *,
    lean: bool = False,
    recomputed: Sequence[Block] = (),
) -> StepMemory:
    """Return the memory of a step of a plan.

    Parameters
    ----------
    profile : CostProfile
        Costs of a model whose nodes have known shapes.
    modes : sequence of Mode
        How each group is trained, in backward order.
    lean : bool
        Whether layers are run by `fl_elastic.ops`, which keep only what their mode needs.
    recomputed : sequence of Block
        Blocks that store only their input and run a second time; they do not overlap.
    """
    mask = np.array([not mode.is_frozen for mode in modes])
    groups = profile.graph.groups
    numbers = np.array([_trained_numbers(g, m) for g, m in zip(groups, modes, strict=True)], float)
    weights = float(numbers.sum())
    statistics = float(
        sum(g.statistics for g, m in zip(groups, modes, strict=True) if not m.is_frozen)
    )
    running, passing = profile.running_nodes(mask)
    stored = running.copy()
    largest, again = 0.0, np.zeros(len(running)) if recomputed else None
    for block in recomputed:
        inside = np.zeros(len(running), dtype=bool)
        inside[list(block.nodes)] = True
        stored &= ~inside
        inner = kept_by(profile, modes, running & inside, lean=lean)
        largest = max(largest, inner.bytes)
        assert again is not None
        again += np.where(inside, inner.held_at_nodes(), 0.0)
    inputs = [(b.input_node, b.output_node) for b in recomputed if running[b.output_node]]
    kept = kept_by(profile, modes, stored, lean=lean, inputs=inputs)
    return StepMemory(
        activations=kept.bytes + largest,
        gradients=FLOAT * weights,
        optimizer=profile.optimizer_bytes_per_weight * weights,
        largest_block=largest,
        copies=FLOAT * weights + _STATISTIC * statistics + profile.held_bytes,
        moment=_most_at_once(
            profile, kept.held_at_nodes(), again, numbers, running, passing, lean=lean
        ),
        code=profile.code_bytes,
    )


def mask_bytes(profile: CostProfile, mask: Mask, *, lean: bool = False) -> float:
    """Return the total memory of a step that trains the groups in ``mask`` in full, as `step_memory` counts it."""
    # Cached, because making a plan asks for most masks more than once.
    known, asked = node_table(profile).totals, (mask.astype(bool).tobytes(), lean)
    if asked not in known:
        known[asked] = _bytes_of(profile, mask.astype(bool), lean)
    return known[asked]


def _bytes_of(profile: CostProfile, mask: Mask, lean: bool) -> float:
    table, (running, passing) = node_table(profile), profile.running_nodes(mask)
    trained = np.append(mask, False)[table.group]
    whole = running & ((table.whole_if_lean if lean else table.whole_if_plain) | trained)
    kept = Kept(
        table, whole, np.where(running, table.extra, 0.0) if lean else np.zeros(len(running))
    )
    numbers = np.where(mask, profile.parameter_bytes, 0.0) / FLOAT
    held = kept.held_at_nodes()
    moment = _most_at_once(profile, held, None, numbers, running, passing, lean=lean)
    kept_on = (FLOAT + profile.optimizer_bytes_per_weight) * float(numbers.sum())
    kept_on += profile.held_bytes + _STATISTIC * float(table.statistics[mask].sum())
    return with_code(kept_on + moment, profile.code_bytes)


def inference_bytes(profile: CostProfile) -> float:
    """Return the least possible peak bytes of an inference pass, besides the weights."""
    return node_table(profile).flight.inference


def trial_bytes(profile: CostProfile) -> float:
    """Return the memory of a plain step that trains everything and frees each gradient once it is computed."""
    everything = [Mode.FULL] * len(profile)
    running, passing = profile.running_nodes(np.ones(len(profile), dtype=bool))
    held = kept_by(profile, everything, running, lean=False).held_at_nodes()
    numbers = np.zeros(len(profile))
    moment = _most_at_once(profile, held, None, numbers, running, passing, lean=False)
    largest = float(profile.parameter_bytes.max(initial=0.0))
    return with_code(moment + largest, profile.code_bytes)


def _most_at_once(
    profile: CostProfile,
    held: Seconds,
    again: Seconds | None,
    numbers: Seconds,
    running: Mask,
    passing: Mask,
    *,
    lean: bool,
) -> float:
    """Return the peak of activations, gradients and tensors on their way, minus that of inference.

    Parameters
    ----------
    profile : CostProfile
        Costs of the step.
    held : array, shape (M,)
        Bytes that each node keeps, from the forward pass until it runs backward.
    again : array, shape (M,)
        Extra bytes that each node of a recomputed block keeps while the block runs again; None without such blocks.
    numbers : array, shape (N,)
        Number of trained weights of each group.
    running, passing : array, shape (M,)
        Nodes that run backward, and those of them that pass the error gradient on.
    lean : bool
        Whether lean layers run, which unpack bits and bytes into temporary tensors.
    """
    gradients = np.zeros(len(held))
    gradients[node_table(profile).first] = FLOAT * numbers
    forward, backward = _at_nodes(
        profile, held, again, numbers, np.cumsum(gradients), running, passing, lean=lean
    )
    # Computing the update as a difference takes one more tensor; the optimiser may take more.
    largest = max(FLOAT, profile.optimizer_moment_per_weight) * float(numbers.max(initial=0.0))
    last = FLOAT * float(numbers.sum()) + largest
    most = max(float(backward.max(initial=0.0)), float(forward.max(initial=0.0)), last)
    return max(most - inference_bytes(profile), 0.0)


def _at_nodes(
    profile: CostProfile,
    held: Seconds,
    again: Seconds | None,
    numbers: Seconds,
    gradients: Seconds,
    running: Mask,
    passing: Mask,
    *,
    lean: bool,
) -> tuple[Seconds, Seconds]:
    """Return the bytes while each node runs forward, and while it runs backward with ``gradients`` in memory."""
    table = node_table(profile)
    flight = table.flight
    below = np.cumsum(held[::-1])[::-1]
    backward = below + gradients + np.where(passing, flight.passing, flight.ending)
    # Only if weights are trained, not just a bias.
    of_weights = np.append(numbers > profile.parameter_bytes / (2 * FLOAT), False)[table.group]
    backward += np.where(of_weights, flight.training, 0.0)
    # Tensors on their way in the forward pass also exist in inference.
    forward = below - held + np.minimum(flight.passing, flight.inference)
    # A frozen layer applies dropout as well, but keeps its mask only while it runs.
    masks = profile.node_saved_bytes
    dropping = np.where((flight.dropping > 0) & (masks > 0), flight.dropping + masks, 0.0)
    forward = np.where(running, forward, np.maximum(forward, below + dropping))
    if lean:
        backward += table.work
        forward += np.where(running, table.work, 0.0)
    if again is not None:
        backward += np.cumsum(again[::-1])[::-1]
    forward += np.where(running, table.beside[0], 0.0)
    backward += table.beside[1]
    backward[~running] = 0.0
    return forward, backward


def taken_at_nodes(profile: CostProfile) -> Seconds:
    """Return the bytes while each node runs forward, and while it runs backward, shape (2, M).

    The step is a plain one that trains everything and frees each gradient once it is complete.
    """
    everything = np.ones(len(profile), dtype=bool)
    running, passing = profile.running_nodes(everything)
    held = kept_by(profile, [Mode.FULL] * len(profile), running, lean=False).held_at_nodes()
    numbers, gradients = profile.parameter_bytes / FLOAT, np.zeros(len(held))
    for own, nodes in zip(profile.parameter_bytes, node_table(profile).owners, strict=True):
        # From a shared weight's first use to its last.
        gradients[nodes[0] : nodes[-1] + 1] += own
    return np.stack(
        _at_nodes(profile, held, None, numbers, gradients, running, passing, lean=False)
    )


def recompute_seconds(profile: CostProfile, block: Block) -> float:
    """Return the time of a block's forward pass, from the measured passes up to the cuts around it."""
    cuts = profile.graph.cuts
    if len(profile.cut_plain_seconds) == 0:
        share = len(block.nodes) / max(len(profile.graph.nodes), 1)
        return float(profile.forward_seconds[-1]) * share
    places = [cut.node for cut in cuts]
    deeper, shallower = np.interp(
        [block.input_node, block.output_node], places, profile.cut_plain_seconds
    )
    return float(max(shallower - deeper, 0.0))


def path_activation_bytes(profile: CostProfile, inside: set[int], *, lean: bool) -> Seconds:
    """Return for each group the bytes kept between it and the group before if neither is trained, shape (N,).

    Nodes ``inside`` recomputed blocks keep nothing. Without lean layers a frozen convolution or norm keeps as much
    as a trained one, which is counted here.
    """
    table = node_table(profile)
    own = profile.node_saved_bytes
    own = np.where(table.whole_if_lean if lean else table.whole_if_plain, own, 0.0)
    if lean:
        own = own + table.extra
    path: Seconds = np.zeros(len(profile))
    group, deepest = 0, [nodes[-1] for nodes in table.owners]
    for index in range(len(profile.graph.nodes)):
        while group < len(profile) and index > deepest[group]:
            group += 1
        if group < len(profile) and index not in inside:
            path[group] += own[index]
    return path


def group_activation_bytes(
    profile: CostProfile, group: int, mode: Mode, inside: set[int], *, lean: bool
) -> float:
    """Return the bytes that a group keeps in ``mode`` beyond what it keeps when frozen, at least 0.

    A convolution trained by channels may keep less than a frozen convolution of torch, which keeps its whole input.
    The result is then 0, and not negative, so that the sum over groups is never too small.
    """
    frozen = [Mode.FROZEN] * len(profile)
    trained = [mode if index == group else Mode.FROZEN for index in range(len(profile))]
    own = np.zeros(len(profile.graph.nodes), dtype=bool)
    own[[index for index in node_table(profile).owners[group] if index not in inside]] = True
    more = kept_by(profile, trained, own, lean=lean).bytes
    return max(more - kept_by(profile, frozen, own, lean=lean).bytes, 0.0)


def _trained_numbers(group: TensorGroup, mode: Mode) -> int:
    if mode.kind not in ("frozen", "bias"):
        return group.numel
    trained = mode.trains(group)
    pairs = zip(group.parameters, group.shapes, strict=True)
    return sum(math.prod(shape) for name, shape in pairs if name in trained)
