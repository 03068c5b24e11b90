"""Which blocks to run a second time instead of storing what they need, so that a step fits the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Block, Mode
from fl_elastic.profiling import CostProfile, recompute_seconds, step_memory

__all__ = ["Recomputation", "candidate_blocks", "cheapest_recomputation", "least_memory"]

_LARGEST_SHARE = 0.25
_MOST_BLOCKS = 14


@dataclass(frozen=True)
class Recomputation:
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
) -> Recomputation | None:
    """Return the quickest recomputation that keeps at most ``limit`` bytes, None if there is none.

    Store or recompute, as in POET (Patil et al., ICML 2022), for the blocks of `candidate_blocks`: every
    subset of the up to 14 blocks that save most is tried.
    """
    options = _subsets(profile, modes, lean=lean)
    fitting = options.bytes <= limit
    if not fitting.any():
        return None
    return options.at(int(np.where(fitting, options.seconds, np.inf).argmin()))


def least_memory(profile: CostProfile, modes: Sequence[Mode], *, lean: bool) -> float:
    """Return the fewest bytes that a step with these modes can keep."""
    return float(_subsets(profile, modes, lean=lean).bytes.min())


@dataclass(frozen=True, eq=False)
class _Subsets:
    blocks: tuple[Block, ...]
    chosen: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]

    def at(self, row: int) -> Recomputation:
        blocks = tuple(b for b, on in zip(self.blocks, self.chosen[row], strict=True) if on)
        return Recomputation(blocks, float(self.seconds[row]), float(self.bytes[row]))


def _subsets(profile: CostProfile, modes: Sequence[Mode], *, lean: bool) -> _Subsets:
    """Return every subset of the candidate blocks, with what it takes longer and keeps."""
    base = step_memory(profile, modes, lean=lean).total
    found = []
    for block in candidate_blocks(profile):
        alone = step_memory(profile, modes, lean=lean, recomputed=[block])
        saving = base - (alone.total - alone.largest_block)
        if saving > 0:
            found.append((saving, alone.largest_block, block))
    found = sorted(found, key=lambda entry: entry[0], reverse=True)[:_MOST_BLOCKS]
    count = len(found)
    chosen = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1
    savings = np.array([saving for saving, _, _ in found])
    inners = np.array([inner for _, inner, _ in found])
    times = np.array([recompute_seconds(profile, block) for _, _, block in found])
    kept = base - chosen @ savings + np.where(chosen, inners, 0.0).max(axis=1, initial=0.0)
    return _Subsets(tuple(b for _, _, b in found), chosen, chosen @ times, kept)


def _contains(outer: Block, inner: Block) -> bool:
    return outer != inner and (
        outer.output_node <= inner.output_node and inner.input_node <= outer.input_node
    )
