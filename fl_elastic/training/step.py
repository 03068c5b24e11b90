"""One training step: loss, gradients, proximal term, the optimiser's step, and the importance read from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import DivergedError, MissedCut, PlanError
from fl_elastic.groups import Batch, LossFn, TensorGroup
from fl_elastic.groups.forward import compute_loss
from fl_elastic.optimizers import KeptOptimizer, moves_by_gradient, refusing_closures
from fl_elastic.planning import Plan
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.step_transform import StandIn, StepGuard, StepOpener
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.memory import code_is_loaded
from fl_elastic.training.apply_plan import plan_guards

if TYPE_CHECKING:
    from fl_elastic.training.elastic_forward import ElasticForward

# Number of steps of a plan in which the optimiser is timed.
_TIMED = 5
# Number of the step from which on a group that no gradient has reached counts as having no importance.
_TELLING = 2
# Number of weights whose change is computed at once. The change of a whole big layer would need new memory, which
# takes longer than the step; parts fit the cache.
_PART = 1 << 18
Watch = Callable[[Mapping[str, nn.Parameter], torch.optim.Optimizer], None]


class TrainingStep:
    """Takes the training steps of a fit, each on one batch or on several accumulated ones.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizing : KeptOptimizer
        The trainer's optimiser.
    pull : ProximalPull
        FedProx's proximal term, which pulls towards the weights that the fit started from.
    clock : callable
        Returns the time in seconds.
    forward : ElasticForward, optional
        Runs the frozen prefix, if the forward pass is elastic.
    worth : StepImportance, optional
        Reads importance from gradients, if steps measure it.
    watch : callable, optional
        ``watch(parameters, optimizer)`` sees the gradients of the trained parameters, by name, before each step.
    accumulate : int
        Number of batches whose gradients a step adds up, each divided by this number.

    Attributes
    ----------
    optimizer_seconds : list of float
        Time of the optimiser in the first steps of the present plan; on a GPU, timing delays the step.
    opener : StepOpener or None
        The last opener that prepared steps; it holds the masks of the parts that these have trained in the fit.
    moved : set of int
        Ids of the parameters that the last step trained in part, through stand-ins that hold the gradients, or that
        it may have moved without a gradient.
    stepped : bool
        Whether the last batch completed an optimiser step.
    taken : int
        Number of optimiser steps.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizing: KeptOptimizer,
        pull: ProximalPull,
        clock: Clock,
        *,
        forward: ElasticForward | None = None,
        worth: StepImportance | None = None,
        watch: Watch | None = None,
        accumulate: int = 1,
    ) -> None:
        self.clock = clock
        self.optimizer_seconds: list[float] = []
        self.model = model
        self.loss_fn = loss_fn
        self.optimizing = optimizing
        self.forward, self.worth, self.accumulate = forward, worth, accumulate
        self._watch = watch
        self._pull = pull
        self.opener: StepOpener | None = None
        self._opener: StepOpener | None = None
        self.moved: set[int] = set()
        self.stepped, self._waiting, self.taken = False, 0, 0
        self._guards: list[StepGuard] = []
        self._moved_anyway: set[int] = set()
        self._whole: tuple[int, ...] = ()
        self._trained: Mapping[str, nn.Parameter] = {}

    def begin(
        self,
        plan: Plan,
        trained: Mapping[str, nn.Parameter],
        unmoved: Mapping[str, np.ndarray],
    ) -> None:
        """Train the parameters of a plan from the next step on; no step has changed ``unmoved`` weights yet."""
        self._whole = tuple(i for i, mode in enumerate(plan.modes) if mode.kind == "full")
        self.finalize()
        self._trained = trained
        optimizer = self.optimizing()
        self._guards = plan_guards(plan, self.model, unmoved, optimizer)
        by_gradient = moves_by_gradient(optimizer)
        self._moved_anyway = (
            set() if by_gradient else {id(parameter) for parameter in trained.values()}
        )
        self.moved = set()
        self._opener = None
        for transform in plan.transforms:
            self._opener = transform.opener(self.model, self.opener) or self._opener
        if self._opener is not None:
            if self.accumulate > 1:
                raise PlanError(
                    f"policy {plan.policy!r} draws another part of the model for each batch, and accumulate "
                    f"{self.accumulate} would add up gradients of different ones: use accumulate 1, or another "
                    "policy"
                )
            self.opener = self._opener
        self.optimizer_seconds = []

    def finalize(self) -> None:
        """Let the guards of the present plan write the optimiser's state in its final form."""
        for guard in self._guards:
            guard.finalize()

    def take(self, batch: Batch) -> float:
        """Take one step, or one batch of an accumulated step, and return the loss of the batch.

        Raises
        ------
        DivergedError
            If the loss is not finite.
        """
        optimizer = self.optimizing()
        opener = self._opener
        opened: AbstractContextManager[Sequence[StandIn]] = (
            nullcontext(()) if opener is None else opener.step(optimizer, batch)
        )
        with opened as stand_ins:
            value = self._take(optimizer, batch, stand_ins)
            self.moved = {
                id(stand_in.whole) for stand_in in stand_ins if stand_in.part.grad is not None
            }
            self.moved |= self._moved_anyway
        return value

    def _take(
        self, optimizer: torch.optim.Optimizer, batch: Batch, stand_ins: Iterable[StandIn]
    ) -> float:
        """Take the step; ``stand_ins`` are trained in place of some parameters."""
        if not self._waiting:
            optimizer.zero_grad(set_to_none=True)
        self.stepped = False
        loss = self._loss(batch)
        value = loss.item()
        if not np.isfinite(value):
            raise DivergedError(
                f"the loss is {value}: check the batch for NaN and the learning rate, and whether the loss ignores "
                "all of its targets; "
                "the model was put back to where the fit started"
            )
        if loss.requires_grad:
            part = loss / self.accumulate if self.accumulate > 1 else loss
            part.backward()  # type: ignore[no-untyped-call]
            self._waiting += 1
        # Otherwise the loss does not depend on a trained parameter, as with routing, and the batch is skipped.
        if self._waiting == self.accumulate:
            self.finish(stand_ins)
        return value

    @property
    def waits(self) -> bool:
        """Whether accumulated gradients wait for more batches."""
        return self._waiting > 0

    def finish(self, stand_ins: Iterable[StandIn] = ()) -> bool:
        """Take the optimiser's step with the accumulated gradients; return whether there were any."""
        self.stepped, self._waiting = self.waits, 0
        if not self.stepped:
            return False
        self.taken += 1
        optimizer = self.optimizing()
        if self.worth is not None:
            self.worth.observe(self._whole)
        if self._watch is not None:
            self._watch(self._trained, optimizer)
        self._pull.add_to_gradients(stand_ins)
        timed = len(self.optimizer_seconds) < _TIMED
        started = self.clock() if timed else 0.0
        for guard in self._guards:
            guard.remember()
        with refusing_closures(optimizer):
            optimizer.step()
        if timed:
            self.optimizer_seconds.append(self.clock() - started)
        code_is_loaded()
        for guard in self._guards:
            guard.put_back()
        return True

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, computed from the features at the cut if there is one."""
        if self.forward is not None:
            try:
                with self.forward.step(batch):
                    return compute_loss(self.model, self.loss_fn, batch)
            except MissedCut as error:
                self.forward.go_whole(str(error))
        return compute_loss(self.model, self.loss_fn, batch)


@dataclass(frozen=True)
class ProximalPull:
    r"""Adds the gradient of :math:`\frac{\mu}{2} \lVert w - w_0 \rVert^2` (Li et al., MLSys 2020, eq. 2).

    Attributes
    ----------
    weight : float
        :math:`\mu`.
    anchors : tuple of (Parameter, Tensor)
        Each parameter and the value that it is pulled towards.
    """

    weight: float = 0.0
    anchors: tuple[tuple[nn.Parameter, Tensor], ...] = ()

    @classmethod
    def towards_present(cls, model: nn.Module, weight: float) -> ProximalPull:
        """Return the pull towards the model's present weights; a pull of ``weight`` 0 copies nothing."""
        if weight == 0:
            return cls()
        parameters = [p for p in model.parameters() if p.requires_grad]
        return cls(weight, tuple((p, p.detach().clone()) for p in parameters))

    @torch.no_grad()
    def add_to_gradients(self, stand_ins: Iterable[StandIn] = ()) -> None:
        """Add the pull to every existing gradient: parameters without one are not trained now.

        Parameters
        ----------
        stand_ins : iterable of StandIn
            Stand-ins that are pulled in place of their parameters.
        """
        instead = {id(stand_in.whole): stand_in for stand_in in stand_ins}
        for parameter, anchor in self.anchors:
            each = instead.get(id(parameter))
            if each is not None:
                parameter, anchor = each.part, each.take(anchor)
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor, alpha=self.weight)


class StepImportance:
    r"""Reads the importance of the trained groups from two consecutive training steps.

    :math:`I_k = -\langle g_k(B),\ \Delta w_k(A)\rangle`, where :math:`\Delta w_k(A)` is the change of group k in
    the fit's first step, on batch A, and g is the gradient of the next step, on batch B. This is
    `ElasticImportance` of those two batches without an extra pass: the weights before the fit are kept anyway, and
    only one product per tensor remains.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    before : callable
        ``before(parameter)`` returns its value at the start of the fit.
    groups : sequence of TensorGroup
        In backward order.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[nn.Parameter], NDArray[Any]],
        groups: Sequence[TensorGroup],
    ) -> None:
        self._before = before
        known = dict(model.named_parameters(remove_duplicate=False))
        self._unread = [{name: known[name] for name in group.parameters} for group in groups]
        self._stepped: set[str] = set()
        self._steps: Counter[int] = Counter()
        self._scores = np.full(len(groups), np.nan)

    def observe(self, whole: Iterable[int]) -> None:
        """Read the gradients of a step, before the optimiser takes it.

        Parameters
        ----------
        whole : iterable of int
            Indices of the groups that the step trains in full.
        """
        for index in whole:
            unread, self._steps[index] = self._unread[index], self._steps[index] + 1
            for name, parameter in [*unread.items()]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if name not in self._stepped:
                    self._stepped.add(name)
                    continue
                del unread[name]
                read = -_along(gradient, parameter, torch.as_tensor(self._before(parameter)))
                if math.isfinite(read):
                    self._scores[index] = np.nan_to_num(self._scores[index]) + read
            if self._steps[index] == _TELLING and self._stepped.isdisjoint(unread):
                # Every gradient was read already, or the batches do not use the group, and a step gains nothing.
                self._scores[index] = np.nan_to_num(self._scores[index])

    def scores(self) -> Scores:
        """Return the scores read since the last call, shape (N,); NaN for a group without any."""
        found = self._scores.copy()
        self._scores[:] = np.nan
        return found


@torch.no_grad()
def _along(gradient: Tensor, now: Tensor, before: Tensor) -> float:
    """Return the sum of gradient times change, computed in parts."""
    tensors = [tensor if tensor.dim() else tensor[None] for tensor in (gradient, now, before)]
    rows = max(_PART // max(now[:1].numel() if now.dim() else 1, 1), 1)
    parts = zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
    sums = [torch.sum((w - b.to(w)).mul_(g), dtype=torch.float32) for g, w, b in parts]
    return float(torch.stack(sums).sum())
