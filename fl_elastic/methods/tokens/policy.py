"""The policies that drop tokens of a transformer, and the check whether a model allows it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.batch_rows import take_examples
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import repeated_rng, untouched
from fl_elastic.methods.tokens.blocks import TokenBlock, token_blocks
from fl_elastic.methods.tokens.dropping import dropping, handing_on
from fl_elastic.methods.tokens.kept import KeptTokens
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Policy
from fl_elastic.planning.request import PlanRequest, PolicyMemory
from fl_elastic.profiling import CostProfile
from fl_elastic.registry import first_line

# A class token, and possibly one for distillation.
_MOST_CLASSES = 2
_FEW = 2
_TOLERANCE = 1e-3


class TokenPolicy(Policy):
    """A policy for chains of transformer blocks whose outputs depend on class tokens only."""

    name: ClassVar[str]

    @abstractmethod
    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the first block after which the policy may ever drop tokens."""

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model that is not a chain of at least two blocks."""
        found = len(token_blocks(profile.graph))
        if found < 2:
            raise PlanError(
                f"policy {self.name!r} drops tokens between the blocks of a transformer, and {found} blocks were "
                "found in this model: a block passes on one sequence of tokens, of shape (N, tokens, width), and "
                "has one attention over all tokens, and no part of the model may be held back from training; use "
                "policy 'elastic'"
            )

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Run the model to find the number of its class tokens.

        Raises
        ------
        PlanError
            If the model cannot run on a part of its tokens.
        """
        blocks = token_blocks(profile.graph)
        classes = _class_tokens(
            probe.model, probe.loss_fn, probe.batches[0], blocks, self.first_drop(blocks)
        )
        return PolicyMemory(self.name, {"classes": classes})


def classes_of(request: PlanRequest, policy: str) -> int:
    """Return the number of class tokens that `TokenPolicy.observe` found."""
    return int(request.memory.of(policy).facts.get("classes", 1))


def with_tokens(plan: Plan, request: PlanRequest, kept: KeptTokens) -> Plan:
    """Return a plan priced for fewer tokens, with full and floor steps priced on all tokens."""
    return replace(
        plan,
        full_step_seconds=request.profile.full_step_seconds,
        floor_step_seconds=request.profile.floor_step_seconds,
    ).having(kept)


def _class_tokens(
    model: nn.Module, loss_fn: LossFn, batch: Batch, blocks: Sequence[TokenBlock], first: TokenBlock
) -> int:
    """Return the number of leading tokens that alone determine the outputs; the model is left unchanged.

    Parameters
    ----------
    model : nn.Module
        A chain of ``blocks``.
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    batch : batch
        Two of its examples are used.
    blocks : sequence of TokenBlock
        All blocks, see `token_blocks`.
    first : TokenBlock
        The first block after which tokens may be dropped.

    Raises
    ------
    PlanError
        If the outputs depend on all tokens, or if layers above ``first`` depend on the tokens' positions or do not
        run on fewer tokens.
    """
    inputs, targets = take_examples(as_pair(batch), slice(_FEW))
    few, last = (inputs, targets), blocks[-1].module
    with untouched(model, loss_fn), repeated_rng(model), torch.no_grad():
        model.eval()
        classes = next(
            (n for n in range(1, _MOST_CLASSES + 1) if _reads_only(model, loss_fn, few, last, n)),
            None,
        )
        if classes is None:
            raise PlanError(
                "the model's outputs depend on all tokens of its last block, for example on their mean: tokens can "
                "only be dropped if the outputs depend on the class tokens alone, which come first; use policy "
                "'elastic'"
            )
        order = _mixed(first.tokens, classes)
        with _with_output(model, last, lambda tokens: tokens) as plain:
            compute_loss(model, loss_fn, few)
        with (
            _with_output(model, last, lambda tokens: tokens) as mixed,
            _with_output(model, first.module, lambda tokens: tokens[:, order]),
        ):
            compute_loss(model, loss_fn, few)
        if not _alike(plain[0][:, order], mixed[0]):
            raise PlanError(
                f"the layers above {first.module!r} depend on the tokens' positions, for example by biases for "
                "their distance: tokens can only be dropped if positions are added once, before the first block; "
                "use policy 'elastic'"
            )
        try:
            with dropping(model, first.module, classes, lambda count: max(1, count // 2)):
                compute_loss(model, loss_fn, few)
        except PlanError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise PlanError(
                f"the layers above {first.module!r} do not run on fewer tokens: {reason}; use policy 'elastic'"
            ) from error
    return classes


def _reads_only(model: nn.Module, loss_fn: LossFn, batch: Batch, last: str, classes: int) -> bool:
    """Return whether the loss does not depend on the other tokens after the last block."""

    def lost(tokens: Tensor) -> Tensor:
        left = torch.full_like(tokens, torch.nan)
        left[:, :classes] = tokens[:, :classes]
        return left

    with _with_output(model, last, lost):
        return bool(compute_loss(model, loss_fn, batch).isfinite())


@contextmanager
def _with_output(
    model: nn.Module, module: str, change: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Change a module's output inside the context, and record the original output."""
    noted: list[Tensor] = []

    def changed(run: Callable[[], Tensor]) -> Tensor:
        tokens = run()
        noted.append(tokens)
        return change(tokens)

    with handing_on(model, module, changed):
        yield noted


def _mixed(tokens: int, classes: int) -> list[int]:
    """Return positions in a fixed random order; class tokens keep their positions."""
    others = torch.randperm(tokens - classes, generator=torch.Generator().manual_seed(0)) + classes
    return [*range(classes), *others.tolist()]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    # Low-precision numbers are rounded in each layer.
    tolerance = max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps)
    return bool((one - other).abs().max() <= tolerance * one.abs().max().clamp(min=1e-6))


@POLICIES.register("bsr")
class BsrPolicy(TokenPolicy):
    """Train the head and as many of the last blocks as fit, on the tokens that a frozen block attends to.

    In the style of BSR (2024), of which only the abstract was read: blocks of a pretrained vision transformer are
    frozen, and tokens are dropped by the attention of a frozen block. Here this is the class token's attention in
    the last frozen block, averaged over heads. Frozen parts run as inference, so an example keeps the same tokens
    in every epoch, and only features of these tokens are stored.

    Parameters
    ----------
    keep : float
        Share of the tokens, without the class token, that are kept, rounded up.
    fraction : float
        Largest share of the blocks that is trained, rounded up; at least one block stays frozen.

    Raises
    ------
    PlanError
        If a share is invalid.
    """

    needs_coverage = False
    needs_eval_prefix = True
    basis = "last blocks, kept tokens"
    name: ClassVar[str] = "bsr"

    def __init__(self, keep: float = 0.5, fraction: float = 0.5) -> None:
        KeptTokens((("", keep),))
        if not 0 < fraction <= 1:
            raise PlanError(f"fraction {fraction} of the blocks must be above 0 and at most 1")
        self.keep, self.fraction = keep, fraction

    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the last frozen block if as many blocks as possible are trained."""
        return blocks[len(blocks) - self._most(len(blocks)) - 1]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan with the most blocks that fit, or the head alone; raise BudgetError if nothing fits."""
        blocks = token_blocks(request.profile.graph)
        for count in range(self._most(len(blocks)), 0, -1):
            block, lowest = blocks[len(blocks) - count - 1 :][:2]
            if block.groups_above == lowest.groups_above:
                # The block lies below the fleet's cut and may not be trained: a later block is the last frozen one.
                continue
            kept = KeptTokens(((block.module, self.keep),), classes_of(request, self.name))
            fewer = request.with_transform(kept)
            mask = np.arange(len(request.profile)) < block.groups_above
            if fewer.fits(mask):
                return with_tokens(fewer.plan_of_mask(self.name, mask), request, kept)
        return request.plan_of_mask(self.name, request.head_mask())

    def _most(self, blocks: int) -> int:
        return max(0, min(math.ceil(self.fraction * blocks), blocks - 1))


@POLICIES.register("e_vit")
class EVitPolicy(TokenPolicy):
    """Train every group, and drop tokens after a quarter, a half and three quarters of the blocks.

    After Tri-Level E-ViT (Kong et al., AAAI 2023): the remaining tokens that the class token attends to most,
    averaged over heads, are kept. Tokens are dropped after a block, not before its MLP. Of the method's other two
    levels, the choice of examples is left to the sampler, and masks on attention are omitted because they cost
    time. The published share falls from epoch to epoch; here it is constant. Under a time budget, fewer steps are
    taken.

    Parameters
    ----------
    keep : float
        Share of the remaining patches that is kept at each of the three places, rounded up.

    Raises
    ------
    PlanError
        If the share is invalid.
    """

    needs_coverage = False
    reduces_uplink = False
    basis = "kept tokens"
    name: ClassVar[str] = "e_vit"

    def __init__(self, keep: float = 0.9) -> None:
        KeptTokens((("", keep),))
        self.keep = keep

    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the block after the first quarter of the blocks."""
        return _places(blocks)[0]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains everything on the kept tokens."""
        blocks = token_blocks(request.profile.graph)
        everything = np.ones(len(request.profile), dtype=bool)
        if len(blocks) < 2 or self.keep == 1:
            return request.plan_of_mask(self.name, everything)
        places = _places(blocks)
        drops = tuple((block.module, self.keep) for block in places)
        kept = KeptTokens(drops, classes_of(request, self.name))
        fewer = request.with_transform(kept)
        return with_tokens(fewer.plan_of_mask(self.name, everything), request, kept)


def _places(blocks: Sequence[TokenBlock]) -> list[TokenBlock]:
    """Return the blocks after which tokens are dropped: for example the fourth, seventh and tenth of twelve."""
    depth = len(blocks)
    return [
        blocks[place] for place in sorted({depth // 4, depth // 2, depth * 3 // 4} - {depth - 1})
    ]
