"""Blocks that run a second time instead of keeping what they need: which ones a step takes, and how they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fl_elastic.errors import PlanError
from fl_elastic.groups.graph import Block
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.torch_private import NormWithStatistics, own_buffers
from fl_elastic.groups.untouched import RngState
from fl_elastic.planning.step_transform import StepCase, StepTransform
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import recompute_seconds

if TYPE_CHECKING:
    from fl_elastic.planning.plan import Plan


import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode
from fl_elastic.profiling.memory import step_memory

__all__ = [
    "Recomputation",
    "RecomputedBlocks",
    "candidate_blocks",
    "cheapest_recomputation",
    "least_memory",
]

_LARGEST_SHARE = 0.25
_MOST_BLOCKS = 14
_MOST_TRIED = 48


@dataclass(frozen=True)
class RecomputedBlocks:
    """Blocks to recompute, what that takes longer, and the bytes that the step then keeps."""

    blocks: tuple[Block, ...]
    seconds: float
    bytes: float


def candidate_blocks(profile: CostProfile) -> tuple[Block, ...]:
    """Return blocks that do not overlap, each keeping at most a quarter of what the whole model keeps.

    A block that keeps more is replaced by the blocks inside of it, if it has any.
    """
    saved = profile.node_saved_bytes
    limit = _LARGEST_SHARE * float(saved.sum())
    by_size = sorted(profile.graph.blocks, key=lambda block: len(block.nodes), reverse=True)
    chosen: list[Block] = []
    for block in by_size:
        inside = [other for other in by_size if _contains(block, other)]
        too_large = float(saved[list(block.nodes)].sum()) > limit
        if not (too_large and inside) and not any(_contains(other, block) for other in chosen):
            chosen.append(block)
    return tuple(sorted(chosen, key=lambda block: block.output_node))


def cheapest_recomputation(
    profile: CostProfile, modes: Sequence[Mode], limit: float, *, lean: bool
) -> RecomputedBlocks | None:
    """Return the quickest recomputation that keeps at most ``limit`` bytes, None if there is none.

    Store or recompute, as in POET (Patil et al., ICML 2022), for the blocks of `candidate_blocks`: every
    subset of the up to 14 blocks that save most is tried, and where none of these fits, all blocks up to each size.
    """
    worth = _savings(profile, modes, lean=lean)

    def exact(found: RecomputedBlocks) -> RecomputedBlocks:
        memory = step_memory(profile, modes, lean=lean, recomputed=found.blocks)
        return replace(found, bytes=memory.total)

    options = _subsets(
        worth, _every_subset(min(len(worth.blocks), _MOST_BLOCKS), len(worth.blocks))
    )
    # By the sum of what blocks keep; at its peak a step keeps less, and holds other things besides.
    likely = np.flatnonzero(options.bytes <= limit + worth.base_beyond)
    quickest = likely[np.argsort(options.seconds[likely], kind="stable")]
    # Evenly among them where they are many: the quickest are the likeliest not to fit.
    places = np.linspace(0, len(quickest) - 1, _MOST_TRIED).round().astype(int)
    for place in dict.fromkeys(places.tolist()):
        if len(quickest) and (found := exact(options.at(int(quickest[place])))).bytes <= limit:
            return found
    rows = _subsets(worth, _all_up_to_each_size(worth))
    every = [exact(rows.at(row)) for row in range(len(rows.seconds))]
    fitting = [found for found in every if found.bytes <= limit]
    return min(fitting, key=lambda found: found.seconds, default=None)


def least_memory(profile: CostProfile, modes: Sequence[Mode], *, lean: bool) -> float:
    """Return the fewest bytes that a step with these modes can take.

    While a block runs again it keeps what it kept before, so only the largest recomputed block counts: with that
    one given, recomputing every smaller one as well keeps least.
    """
    worth = _savings(profile, modes, lean=lean)
    rows = _subsets(worth, _all_up_to_each_size(worth))
    return min(
        step_memory(profile, modes, lean=lean, recomputed=rows.at(row).blocks).total
        for row in range(len(rows.seconds))
    )


@dataclass(frozen=True, eq=False)
class _Savings:
    """Blocks that save bytes when they are recomputed, those that save most first."""

    base: float
    base_beyond: float
    blocks: tuple[Block, ...]
    saved: NDArray[np.float64]
    inner: NDArray[np.float64]
    seconds: NDArray[np.float64]


def _savings(profile: CostProfile, modes: Sequence[Mode], *, lean: bool) -> _Savings:
    without = step_memory(profile, modes, lean=lean)
    base = without.kept
    found = []
    for block in candidate_blocks(profile):
        alone = step_memory(profile, modes, lean=lean, recomputed=[block])
        saving = base - (alone.kept - alone.largest_block)
        if saving > 0:
            found.append((saving, alone.largest_block, recompute_seconds(profile, block), block))
    found = sorted(found, key=lambda entry: entry[0], reverse=True)
    columns = np.array([entry[:3] for entry in found], dtype=np.float64).reshape(-1, 3)
    beyond = max(base - without.total, 0.0)
    return _Savings(base, beyond, tuple(entry[3] for entry in found), *columns.T)


def _every_subset(first: int, count: int) -> NDArray[np.bool_]:
    """Return each subset of the ``first`` of ``count`` blocks, shape (2 ** first, count)."""
    chosen = np.zeros((1 << first, count), dtype=bool)
    chosen[:, :first] = (np.arange(1 << first)[:, None] >> np.arange(first)) & 1 == 1
    return chosen


def _all_up_to_each_size(worth: _Savings) -> NDArray[np.bool_]:
    """Return no block at all, and for each block all those that keep no more while they run again."""
    none = np.zeros((1, len(worth.blocks)), dtype=bool)
    return np.concatenate([none, worth.inner[None, :] <= worth.inner[:, None]])


@dataclass(frozen=True, eq=False)
class _Subsets:
    blocks: tuple[Block, ...]
    chosen: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]

    def at(self, row: int) -> RecomputedBlocks:
        blocks = tuple(b for b, on in zip(self.blocks, self.chosen[row], strict=True) if on)
        return RecomputedBlocks(blocks, float(self.seconds[row]), float(self.bytes[row]))


def _subsets(worth: _Savings, chosen: NDArray[np.bool_]) -> _Subsets:
    """Return what each set of blocks takes longer and keeps."""
    largest = np.where(chosen, worth.inner, 0.0).max(axis=1, initial=0.0)
    kept = worth.base - chosen @ worth.saved + largest
    return _Subsets(worth.blocks, chosen, chosen @ worth.seconds, kept)


def _contains(outer: Block, inner: Block) -> bool:
    return outer != inner and (
        outer.output_node <= inner.output_node and inner.input_node <= outer.input_node
    )


_Buffers = list[tuple[dict[str, Any], str, Tensor]]


@dataclass(frozen=True)
class Recomputation(StepTransform):
    """Recompute blocks in the backward pass instead of keeping what they need.

    Attributes
    ----------
    modules : tuple of str
        Of the blocks.
    """

    modules: tuple[str, ...]
    stage: ClassVar[int] = 2

    @contextmanager
    def applied(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        """Let the modules keep their input alone inside the block."""
        del plan
        with ExitStack() as stack:
            for name in self.modules:
                stack.enter_context(_recomputed(model.get_submodule(name)))
            yield

    def seconds(self, profile: CostProfile) -> float:
        """Return the forward pass of the blocks."""
        return sum(recompute_seconds(profile, block) for block in self._blocks(profile))

    def case(self, case: StepCase) -> StepCase:
        """Return the case in which the blocks run a second time; PlanError if the profile has no such blocks."""
        return replace(case, recomputed=tuple(self._blocks(case.profile)))

    def _blocks(self, profile: CostProfile) -> Sequence[Block]:
        known = {block.module: block for block in profile.graph.blocks}
        try:
            return [known[module] for module in self.modules]
        except KeyError as missing:
            raise PlanError(
                f"module {missing} cannot be recomputed: blocks of this model are {', '.join(known) or 'none'}"
            ) from None


@contextmanager
def _recomputed(module: nn.Module) -> Iterator[None]:
    """Keep of a block its input alone inside the block; what it draws and its statistics are as if it ran once."""
    plain = module.forward
    before = module.__dict__.get("forward")

    def forward(x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return plain(x)
        rng, buffers, held = RngState.now(), _other_buffers(module), Attributes.of(module)
        return checkpoint(
            plain,
            x,
            use_reentrant=False,
            context_fn=lambda: (ExitStack(), _as_before(module, rng, buffers, held)),
        )

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before


def _other_buffers(module: nn.Module) -> _Buffers:
    """Return copies of the buffers of all but torch's norms, with where each is held."""
    return [
        (own_buffers(inner), name, buffer.detach().clone())
        for inner in module.modules()
        if not isinstance(inner, NormWithStatistics)
        for name, buffer in own_buffers(inner).items()
        if buffer is not None
    ]


@contextmanager
def _as_before(
    module: nn.Module, rng: RngState, buffers: _Buffers, attributes: Attributes
) -> Iterator[None]:
    """Let a block run again as it ran, also where its statistics, its state and its draws have moved on since."""
    now, held = RngState.now(), [own[name] for own, name, _ in buffers]
    moved_on = Attributes.of(module)
    attributes.put_back()
    # Other tensors for the while: the values of one that the backward pass needs must not be written.
    for own, name, before in buffers:
        own[name] = before
    rng.put_back()
    try:
        with _still_norms(module):
            yield
    finally:
        now.put_back()
        moved_on.put_back()
        for (own, name, _), value in zip(buffers, held, strict=True):
            own[name] = value


@contextmanager
def _still_norms(module: nn.Module) -> Iterator[None]:
    """Keep running statistics from moving a second time while a block runs again."""
    norms = [
        m for m in module.modules() if isinstance(m, NormWithStatistics) and m.track_running_stats
    ]
    moving = [(norm, norm.momentum) for norm in norms if norm.training]
    counts = [(n.num_batches_tracked, n.num_batches_tracked.clone()) for n, _ in moving
              if n.num_batches_tracked is not None]  # fmt: skip
    for norm, _ in moving:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in moving:
            norm.momentum = momentum
        for count, value in counts:
            count.copy_(value)
