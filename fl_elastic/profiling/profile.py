"""Cost profiles: the measured costs of one model on one device, and the cost of any plan by them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ProfileError
from fl_elastic.groups import Batch, Mode
from fl_elastic.groups.forward import batch_shape
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.mode import sent_bytes
from fl_elastic.optimizers import OptimizerFn, made_by

# Settings of optimisers whose value never affects costs.
_NEVER_OFF = ("lr", "initial_lr", "eps", "alpha")
_GRADIENT_BYTES = 4.0
Seconds: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ModeCosts:
    """Costs of each group in other modes than full, relative to training it whole.

    Attributes
    ----------
    modes : tuple of Mode
        The K modes.
    update_ratio, path_ratio : array, shape (N, K)
        Cost of the own gradient (including extra time in the forward pass), and of passing the error gradient
        through the group, both relative to the exact gradient's; NaN if a mode does not apply to a group.
    """

    modes: tuple[Mode, ...]
    update_ratio: NDArray[np.float64]
    path_ratio: NDArray[np.float64]

    def column(self, mode: Mode) -> int | None:
        """Return the column of ``mode``; None if it was not measured."""
        return self.modes.index(mode) if mode in self.modes else None

    def ratios(self, group: int, mode: Mode) -> tuple[float, float] | None:
        """Return a group's ratios for the own gradient and the error gradient in ``mode``; None if not known.

        The ratio of a share of channels that was not measured is interpolated linearly between the nearest measured
        shares; above the largest one, between this and the whole group. Below the smallest one, its ratio is used.

        Examples
        --------
        >>> costs = ModeCosts((Mode.channels(1 / 2),), np.array([[0.6]]), np.ones((1, 1)))
        >>> costs.ratios(0, Mode.channels(3 / 4)), costs.ratios(0, Mode.channels(1 / 4)), costs.ratios(0, Mode.BIAS)
        ((0.8, 1.0), (0.6, 1.0), None)
        """
        column = self.column(mode)
        if column is not None:
            found = float(self.update_ratio[group, column]), float(self.path_ratio[group, column])
            return found if np.isfinite(found[0]) else None
        if mode.kind != "channels":
            return None
        measured = sorted(
            (each.fraction, self.update_ratio[group, c], self.path_ratio[group, c])
            for c, each in enumerate(self.modes)
            if (each.kind, each.axis) == ("channels", mode.axis)
            and np.isfinite(self.update_ratio[group, c])
        )
        if not measured:
            return None
        shares, own, passing_on = zip(*measured, (1.0, 1.0, 1.0), strict=True)
        return float(np.interp(mode.fraction, shares, own)), float(
            np.interp(mode.fraction, shares, passing_on)
        )


@dataclass(frozen=True)
class ProfileKey:
    """What a cost profile is valid for; compared on load."""

    model: str
    batch_shape: tuple[int, ...]
    threads: int
    device: str
    torch_version: str
    optimizer: str = ""

    @property
    def rows(self) -> int:
        """Number of rows of a batch; 1 if the inputs are an object without a shape, such as a graph."""
        return max([1, *self.batch_shape[:1]])

    def differences(self, other: ProfileKey) -> list[str]:
        """Return one phrase per field in which two keys differ."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {mine[name]!r} against {theirs[name]!r}" for name in mine
                if mine[name] != theirs[name]]  # fmt: skip


@dataclass(frozen=True, eq=False)
class SavedTensors:
    """Which tensors the nodes keep for the backward pass; parameters and buffers are not among them.

    Attributes
    ----------
    nodes, tensors : array of int, shape (K,)
        Each pair says that a node keeps a tensor; several nodes may keep the same.
    tensor_bytes : array, shape (T,)
        Size of each tensor's storage.
    outputs : array of int, shape (M,)
        The tensor that a node outputs; -1 if not known.
    channels_last : array of int, shape (M,)
        1 if a node keeps a map or weight stored channels last, else 0; zeros by default.
    beside : array, shape (2, M)
        Temporary bytes of each node beyond those that shapes imply, in the forward and the backward pass, see
        `with_bytes_beside`; empty if no step was recorded.
    """

    nodes: NDArray[np.int64]
    tensors: NDArray[np.int64]
    tensor_bytes: Seconds
    outputs: NDArray[np.int64]
    channels_last: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    beside: Seconds = field(default_factory=lambda: np.zeros((2, 0)))

    @classmethod
    def of_nodes(cls, node_bytes: Seconds) -> SavedTensors:
        """Return one tensor per node, for nodes that share no tensors."""
        each = np.arange(len(node_bytes), dtype=np.int64)
        return cls(each, each, node_bytes, np.full(len(node_bytes), -1, dtype=np.int64))

    def scaled(self, nodes: Seconds, outputs: Seconds) -> SavedTensors:
        """Return each tensor scaled by the share of the node that outputs it, or else of the nodes that keep it.

        Parameters
        ----------
        nodes, outputs : array, shape (M,)
            Share of its work that each node does, and share of its output that it produces.
        """
        share = np.zeros(len(self.tensor_bytes))
        np.maximum.at(share, self.tensors, nodes[self.nodes])
        known = self.outputs >= 0
        share[self.outputs[known]] = outputs[known]
        beside = self.beside * nodes if self.beside.size else self.beside
        return replace(self, tensor_bytes=self.tensor_bytes * share, beside=beside)


@dataclass(frozen=True, eq=False)
class CostProfile:
    """Measured seconds and bytes of one training step; arrays are in backward order.

    Attributes
    ----------
    key : ProfileKey
        What the profile was measured for.
    graph : BackwardGraph
        Groups (length N) and nodes (length M) of the step.
    node_update_seconds, node_path_seconds : array, shape (M,)
        Extra seconds of each node for its own gradient, and for passing the error gradient on.
    optimizer_seconds : array, shape (N,)
        Time of each group's optimiser step.
    forward_seconds : array, shape (N,)
        Time of forward pass and loss if the deepest trained group is this one.
    fixed_seconds : float
        Other time of every step, such as starting the backward pass and clearing gradients.
    node_saved_bytes : array, shape (M,)
        Activation bytes that are kept because this node runs backward; each storage is counted for the shallowest
        node that keeps it.
    optimizer_bytes_per_weight : float
        Optimiser state per trained scalar weight.
    optimizer_moment_per_weight : float
        Temporary bytes of the optimiser, per scalar weight of the tensor that it is updating.
    cut_plain_seconds, cut_inference_seconds : array, shape (C,)
        Time of the forward pass up to each of the graph's cuts: of the frozen but otherwise unchanged model, and of
        inference with BatchNorm folded; empty if not measured.
    lookup_seconds : float
        Time to identify the examples of a batch in a feature store.
    lookup_seconds_per_value : float
        Time to read one number from the store.
    modes : ModeCosts, optional
        Costs of groups in other modes than full, if measured.
    saved : SavedTensors, optional
        The storages that nodes keep; by default each node keeps tensors of its own.
    node_lean : array, shape (M,)
        Kind of the operation of `fl_elastic.ops` by which a node may keep less, see `LeanKind`; zeros by default.
    estimated : bool
        Whether the seconds come from `estimate_profile`, to be refined by training.
    code_bytes : float
        Code that a process has yet to load for its first steps; not a property of the model, and not stored with
        it.
    held_bytes : float
        Bytes of optimiser state from earlier fits; not stored with the profile.
    """

    key: ProfileKey
    graph: BackwardGraph
    node_update_seconds: Seconds
    node_path_seconds: Seconds
    optimizer_seconds: Seconds
    forward_seconds: Seconds
    fixed_seconds: float
    node_saved_bytes: Seconds
    optimizer_bytes_per_weight: float
    cut_plain_seconds: Seconds = field(default_factory=lambda: np.zeros(0))
    cut_inference_seconds: Seconds = field(default_factory=lambda: np.zeros(0))
    lookup_seconds: float = 0.0
    lookup_seconds_per_value: float = 0.0
    modes: ModeCosts | None = None
    saved: SavedTensors | None = None
    node_lean: Seconds = field(default_factory=lambda: np.zeros(0))
    estimated: bool = False
    optimizer_moment_per_weight: float = 4.0
    code_bytes: float = 0.0
    held_bytes: float = 0.0

    def __post_init__(self) -> None:
        lengths = {"node": len(self.graph.nodes), "cut": len(self.graph.cuts)}
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if isinstance(value, np.ndarray):
                expected = lengths.get(name.partition("_")[0], len(self.graph.groups))
                unmeasured = name.startswith(("cut_", "node_lean")) and value.shape == (0,)
                if not unmeasured and value.shape != (expected,):
                    raise ProfileError(f"{name} has shape {value.shape}, expected ({expected},)")
            if isinstance(value, (np.ndarray, float, int)):
                if not np.isfinite(value).all() or np.less(value, 0).any():
                    raise ProfileError(f"{name} holds a negative or non-finite cost")

    def __len__(self) -> int:
        return len(self.graph.groups)

    def accumulated(self, batches: int) -> CostProfile:
        """Return the cost per batch if the optimiser steps once every ``batches`` batches.

        The optimiser's time is spread over the batches; gradients stay in memory during the next batch.
        """
        if batches == 1:
            return self
        return replace(
            self,
            optimizer_seconds=self.optimizer_seconds / batches,
            optimizer_bytes_per_weight=self.optimizer_bytes_per_weight + _GRADIENT_BYTES,
        )

    def with_sending(self, seconds_per_byte: float) -> CostProfile:
        """Return the costs with the sending of each group added to the cost of training it.

        Spread over the round's steps, sending is one more linear cost of a group, so the knapsack can compare a
        second of sending with a second of computing.
        """
        if seconds_per_byte == 0:
            return self
        sending = seconds_per_byte * self.sent_bytes
        return replace(self, optimizer_seconds=self.optimizer_seconds + sending)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups in backward order."""
        return tuple(group.name for group in self.graph.groups)

    @property
    def memory_recorded(self) -> bool:
        """Whether a step's temporary bytes were recorded; also true if no saved tensors are known."""
        return self.saved is None or self.saved.beside.size > 0

    @cached_property
    def parameter_bytes(self) -> Seconds:
        """Bytes of each group's weights as fp32, shape (N,)."""
        return np.array([4.0 * group.numel for group in self.graph.groups])

    @cached_property
    def sent_bytes(self) -> Seconds:
        """Bytes, as fp32, of each group in an update that trains all of it, shape (N,)."""
        return np.array([sent_bytes(group, Mode.FULL) for group in self.graph.groups], float)

    @cached_property
    def update_seconds(self) -> Seconds:
        """Seconds each group adds when it is trained: its own gradient and optimiser step, shape (N,)."""
        own = np.zeros(len(self))
        for node, seconds in zip(self.graph.nodes, self.node_update_seconds, strict=True):
            if node.group is not None:
                own[node.group] += seconds
        return own + self.optimizer_seconds

    @cached_property
    def path_seconds(self) -> Seconds:
        """Seconds that the error gradient takes from the previous group to this one, shape (N,).

        This is the time to pass the error gradient on, in order of execution, plus the extra time of the forward
        pass when the graph reaches this deep. Branches are charged as if they formed one chain; `step_seconds`
        charges them exactly.
        """
        reach: Seconds = np.zeros(len(self))
        group = 0
        deepest = [nodes[-1] for nodes in self.graph.group_nodes()]
        for index, seconds in enumerate(self.node_path_seconds):
            while group < len(self) and index >= deepest[group]:
                group += 1
            if group == len(self):
                break
            reach[group] += seconds
        reach += np.diff(self.forward_seconds, prepend=self.forward_seconds[0]).clip(min=0)
        return reach

    @cached_property
    def full_step_seconds(self) -> float:
        """Seconds of a step that trains every group."""
        return self.step_seconds(np.ones(len(self), dtype=bool))

    @cached_property
    def floor_step_seconds(self) -> float:
        """Seconds of the cheapest step that trains the head."""
        head = np.zeros(len(self), dtype=bool)
        head[self.graph.head] = True
        return self.step_seconds(head)

    def step_seconds(self, mask: Mask) -> float:
        """Return the seconds of one step that trains the groups in ``mask``.

        The real graph is followed: a node runs backward only if a trained group lies at or below it, and passes the
        error gradient on only if a trained group lies below it.
        """
        if not mask.any():
            return float(self.forward_seconds[0])
        _, passing = self.running_nodes(mask)
        depth = int(np.flatnonzero(mask)[-1])
        return float(
            self.forward_seconds[depth]
            + self.node_path_seconds[passing].sum()
            + self.update_seconds[mask].sum()
            + self.fixed_seconds
        )

    def seconds_of(self, masks: Mask) -> Seconds:
        """Return `step_seconds` of many non-empty masks at once, shape (K, N) to (K,)."""
        passing = self.graph.groups_below[1] @ masks.T.astype(np.float32) > 0
        depth = masks.shape[1] - 1 - np.argmax(masks[:, ::-1], axis=1)
        backward: Seconds = self.node_path_seconds @ passing + masks @ self.update_seconds
        backward += self.forward_seconds[depth] + self.fixed_seconds
        return backward

    def plan_seconds(self, modes: Sequence[Mode]) -> float:
        """Return the seconds of one step that trains each group in its mode.

        A mode that was not measured is charged as the whole group; a share of channels is interpolated between
        measured ones.
        """
        mask = np.array([not mode.is_frozen for mode in modes])
        seconds = self.step_seconds(mask)
        if self.modes is None or not mask.any():
            return seconds
        _, passing = self.running_nodes(mask)
        owners = self.graph.group_nodes()
        for group in np.flatnonzero(mask).tolist():
            ratios = self.modes.ratios(group, modes[group])
            if ratios is None:
                continue
            nodes = list(owners[group])
            own = self.node_update_seconds[nodes].sum()
            path = self.node_path_seconds[[n for n in nodes if passing[n]]].sum()
            seconds += own * (ratios[0] - 1) + path * (ratios[1] - 1)
        return seconds

    def running_nodes(self, mask: Mask) -> tuple[Mask, Mask]:
        """Return which nodes run backward, and which of them pass the error gradient on."""
        trained_below = self.graph.groups_below @ mask > 0
        return trained_below[0], trained_below[1]


def trainable_part(
    profile: CostProfile, groups_above: int | None = None, kept_head: str = ""
) -> CostProfile:
    """Return the profile as if the model had only the groups that may be trained.

    The forward pass keeps its costs at each depth, including the frozen prefix, and the error gradient still passes
    through a head that is not trained. A policy that plans with this profile cannot choose the rest of the model.

    Parameters
    ----------
    profile : CostProfile
        Costs of the whole model.
    groups_above : int, optional
        Number of groups above the fleet's cut, see `BackwardGraph.groups_above`; all by default.
    kept_head : str
        Name of the head's group if the head is not to be trained, else empty. The head is trained nevertheless if
        the loss depends on no other group.
    """
    graph = profile.graph
    above = len(graph.groups) if groups_above is None else min(groups_above, len(graph.groups))
    kept = [g for g in range(above) if not kept_head or graph.groups[g].name != kept_head]
    if set(kept) <= {*graph.unused} or len(kept) == len(graph.groups):
        return profile
    number = {group: place for place, group in enumerate(kept)}
    part = replace(
        graph,
        groups=tuple(graph.groups[group] for group in kept),
        # Nodes of groups that are not trained still run, and take memory as in inference.
        nodes=tuple(
            replace(node, group=None if node.group is None else number.get(node.group))
            for node in graph.nodes
        ),
        # Cuts are kept because they locate blocks; their costs are part of the forward pass.
        cuts=tuple(
            replace(cut, groups_above=sum(group < cut.groups_above for group in kept))
            for cut in graph.cuts
        ),
    )
    modes = profile.modes
    if modes is not None:
        modes = ModeCosts(modes.modes, modes.update_ratio[kept], modes.path_ratio[kept])
    return replace(
        profile,
        graph=part,
        optimizer_seconds=profile.optimizer_seconds[kept],
        forward_seconds=profile.forward_seconds[kept],
        cut_plain_seconds=np.zeros(0),
        cut_inference_seconds=np.zeros(0),
        modes=modes,
    )


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU for a model without parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def model_digest(model: nn.Module) -> str:
    """Return a digest of the model's class and of the name, shape and flag of each parameter."""
    parts = [type(model).__name__]
    parts += [f"{name}{tuple(p.shape)}{p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def profile_key(
    model: nn.Module, batch: Batch, optimizer_fn: OptimizerFn | None = None
) -> ProfileKey:
    """Return the key of profiles of ``model`` with this batch shape, this optimiser and its device."""
    device = model_device(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return ProfileKey(
        model=model_digest(model),
        batch_shape=batch_shape(batch),
        threads=torch.get_num_threads(),
        device=f"{device.type}: {name}",
        torch_version=torch.__version__,
        optimizer="" if optimizer_fn is None else _optimizer_case(model, optimizer_fn),
    )


def _optimizer_case(model: nn.Module, optimizer_fn: OptimizerFn) -> str:
    """Return the optimiser's class and those enabled settings that affect its time and its state."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return ""
    made = made_by(optimizer_fn, model)
    settings = {
        name
        for group in made.param_groups
        for name, value in group.items()
        if name not in _NEVER_OFF and isinstance(value, int | float) and value
    }
    return " ".join([type(made).__name__, *sorted(settings)])


@cache
def _processor() -> str:
    """Return the processor's name; cached, because with many cores reading the file takes milliseconds."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
