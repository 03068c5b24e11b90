"""Measure training steps of several plans of one model: the bytes that they keep, and their time."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import classification_loss
from fl_elastic.planning import Plan
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.profiling.clock import clock_for
from fl_elastic.training.apply_plan import plan_applied


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a training step keeps, counted by hooks on saved tensors.

    Attributes
    ----------
    stored : int
        Bytes of the distinct storages that the forward pass keeps for the backward pass, without parameters and
        buffers.
    largest_block : int
        Additional bytes that the largest recomputed block keeps while it runs again; 0 without recomputed blocks.
    """

    stored: int
    largest_block: int = 0

    @property
    def total(self) -> int:
        """The sum of both, an upper bound: the backward pass has freed what lies nearer to the loss."""
        return self.stored + self.largest_block


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum at a small rate."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def vanilla(plan: Plan) -> Plan:
    """Return the plan that trains the same groups with torch's own operations, everything stored."""
    return replace(plan, transforms=())


def saved_bytes(model: nn.Module, plan: Plan, batch: Batch) -> SavedBytes:
    """Return the bytes that one step of ``plan`` keeps; the model is left as it was."""
    with untouched(model):
        with plan_applied(plan, model):
            stored = kept_bytes(lambda: compute_loss(model, classification_loss, batch), model)
        again = plan.transform(Recomputation)
        if again is None:
            return SavedBytes(stored)
        kept = tuple(each for each in plan.transforms if each is not again)
        with plan_applied(replace(plan, transforms=kept), model):
            blocks = [model.get_submodule(name) for name in again.modules]
            with _inputs_of(blocks) as inputs:
                compute_loss(model, classification_loss, batch)
            return SavedBytes(stored, max(_block_bytes(b, x) for b, x in inputs.items()))


def interleaved_seconds(
    model: nn.Module,
    plans: Sequence[Plan],
    batch: Batch,
    *,
    repeats: int = 9,
) -> list[float]:
    """Return the median CPU seconds of a step of each plan, run in alternation; the model is left as it was.

    Steps run in one thread. The time to put a plan's layers in place is not counted.
    """
    timer = clock_for("cpu", "cpu")
    seconds: list[list[float]] = [[] for _ in plans]
    model = copy.deepcopy(model)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for repeat in range(repeats + 1):
        for place, plan in enumerate(plans):
            with plan_applied(plan, model):
                started = timer()
                optimizer.zero_grad(set_to_none=True)
                compute_loss(model, classification_loss, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if repeat:
                    seconds[place].append(timer() - started)
    return [statistics.median(taken) for taken in seconds]


def kept_bytes(run: Callable[[], Any], *owners: Any) -> int:
    """Return the bytes of the distinct storages that ``run()`` saves, without the storages of ``owners``."""
    known = set()
    for owner in owners:
        tensors = [owner] if isinstance(owner, Tensor) else [*owner.parameters(), *owner.buffers()]
        known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    # Holding the tensors prevents the reuse of a storage's address.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> None:
        # Returning an operation's own output from a hook makes a reference cycle that is never freed.
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: torch.empty(0)):
        output = run()
    del output
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)


def _block_bytes(block: nn.Module, given: Tensor) -> int:
    """Return the bytes that a block keeps besides its input, which is counted already."""
    return kept_bytes(lambda: block(given), block, given)


@contextmanager
def _inputs_of(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the input of each module, as a leaf tensor, while the block runs."""
    inputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given = arguments[0]
        inputs[module] = given.detach().clone().requires_grad_(given.requires_grad)

    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
