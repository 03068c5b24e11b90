"""Blocks that keep their input alone, and run a second time in the backward pass."""

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
from fl_elastic.planning.transforms.base import StepCase, StepTransform
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import recompute_seconds

if TYPE_CHECKING:
    from fl_elastic.planning.plan import Plan

__all__ = ["Recomputation"]

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
