"""Recomputation: which blocks run a second time instead of storing their activations, and how they run."""

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

# Largest share of all kept bytes that one recomputed block may keep.
_LARGEST_SHARE = 0.25
# Most blocks of which every subset is considered, and most subsets whose exact memory is computed.
_MOST_BLOCKS, _MOST_TRIED = 14, 48


@dataclass(frozen=True)
class RecomputedBlocks:
    """Blocks to recompute, the extra seconds, and the bytes that the step then keeps."""

    blocks: tuple[Block, ...]
    seconds: float
    bytes: float


def candidate_blocks(profile: CostProfile) -> tuple[Block, ...]:
    """Return blocks that do not overlap, each of which keeps at most a quarter of the model's bytes.

    A block that keeps more is replaced by the blocks inside it, if there are any.
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
    """Return the fastest recomputation that keeps at most ``limit`` bytes; None if there is none.

    As in POET (Patil et al., ICML 2022), each block of `candidate_blocks` is either stored or recomputed. Every
    subset of the up to 14 blocks that save most is tried, and, if none of these fits, all blocks up to each size.
    """
    worth = _savings(profile, modes, lean=lean)

    def exact(found: RecomputedBlocks) -> RecomputedBlocks:
        memory = step_memory(profile, modes, lean=lean, recomputed=found.blocks)
        return replace(found, bytes=memory.total)

    options = _subsets(
        worth, _every_subset(min(len(worth.blocks), _MOST_BLOCKS), len(worth.blocks))
    )
    # A subset's bytes are estimated as the sum of the kept bytes. The real peak may be lower by up to
    # `base_beyond`.
    likely = np.flatnonzero(options.bytes <= limit + worth.base_beyond)
    quickest = likely[np.argsort(options.seconds[likely], kind="stable")]
    # If there are many, sample them evenly: the fastest ones are the least likely to fit.
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

    Recomputed blocks run again one after the other, so only the largest of them adds to the peak. For each possible
    largest block, memory is least if all smaller blocks are recomputed as well.
    """
    worth = _savings(profile, modes, lean=lean)
    rows = _subsets(worth, _all_up_to_each_size(worth))
    return min(
        step_memory(profile, modes, lean=lean, recomputed=rows.at(row).blocks).total
        for row in range(len(rows.seconds))
    )


@dataclass(frozen=True, eq=False)
class _Savings:
    """The blocks that save bytes when recomputed, those that save most first.

    ``base`` is the number of bytes that a step keeps without recomputation; its peak is ``base_beyond`` bytes
    lower. ``saved`` holds the bytes that each block saves, ``inner`` the bytes that it keeps while it runs again,
    and ``seconds`` the time of this run.
    """

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
    """Return every subset of the ``first`` of ``count`` blocks, shape (2 ** first, count)."""
    chosen = np.zeros((1 << first, count), dtype=bool)
    chosen[:, :first] = (np.arange(1 << first)[:, None] >> np.arange(first)) & 1 == 1
    return chosen


def _all_up_to_each_size(worth: _Savings) -> NDArray[np.bool_]:
    """Return the empty set, and for each block the set of all blocks that keep no more while they run again."""
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
    """Return the extra seconds and the kept bytes of each set of blocks."""
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
    """Recompute blocks in the backward pass instead of keeping their activations.

    Attributes
    ----------
    modules : tuple of str
        Names of the blocks' modules.
    """

    modules: tuple[str, ...]
    stage: ClassVar[int] = 2

    @contextmanager
    def applied(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        """Let the modules store only their input, inside the context."""
        del plan
        with ExitStack() as stack:
            for name in self.modules:
                stack.enter_context(_recomputed(model.get_submodule(name)))
            yield

    def seconds(self, profile: CostProfile) -> float:
        """Return the time of the blocks' second forward pass."""
        return sum(recompute_seconds(profile, block) for block in self._blocks(profile))

    def case(self, case: StepCase) -> StepCase:
        """Return the case with the recomputed blocks; raise PlanError if the profile does not have them."""
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
    """Store only a module's input inside the context; random numbers and statistics are as if it ran once."""
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
    """Return copies of all buffers except those of torch's norms, and where each is held."""
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
    """Let a block run again with the RNG, buffers and attributes of its first run; restore the present ones."""
    now, held = RngState.now(), [own[name] for own, name, _ in buffers]
    moved_on = Attributes.of(module)
    attributes.put_back()
    # Swap the tensors: a tensor that the backward pass needs must not be overwritten.
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
    """Keep running statistics from being updated a second time while a block runs again."""
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
