"""One adaptation: train within the budget, check the result, and restore the weights if the model got worse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import all_finite, call_model, compute_loss, one_number, to_device
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.planning import Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.profiling.profile import model_device
from fl_elastic.streaming.body import Body, scores_of
from fl_elastic.streaming.guard import Guard, Row, Score
from fl_elastic.streaming.head import ClassMap
from fl_elastic.training import ElasticTrainer, SelectionState, TrainerOptions
from fl_elastic.update import Manifest, load_weights, weights_of


@dataclass(frozen=True)
class Adaptation:
    """Record of one adaptation.

    Parameters
    ----------
    at : int
        Number of labelled samples seen when it was made.
    drift : bool
        Whether it followed a drift.
    trained : tuple of str
        Tensor groups of the last plan.
    groups : int
        Number of tensor groups of the model.
    steps : int
        Training steps.
    seconds, selection_seconds : float
        Seconds of training, and of choosing what to train; neither includes the measurement of costs.
    loss : float
        Mean training loss over the steps; NaN if training failed.
    before, after : Score
        Scores on held-out samples.
    undone : str
        Why the weights were restored; empty if the adaptation was kept.
    """

    at: int
    drift: bool
    trained: tuple[str, ...]
    groups: int
    steps: int
    seconds: float
    selection_seconds: float
    loss: float
    before: Score
    after: Score
    undone: str = ""


@dataclass(frozen=True, eq=False)
class Outcome:
    """An adaptation, and the cost profile and selection state that the next one starts from."""

    adaptation: Adaptation
    profile: CostProfile | None
    selection: SelectionState


@dataclass(frozen=True, eq=False)
class Engine:
    """Settings that all adaptations share.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(outputs, targets)`` of class scores and output indices.
    optimizer_fn : callable
        Makes a new optimiser for each adaptation: momentum from older data would push in a wrong direction.
    budget, policy, options
        See `ElasticTrainer`.
    guard : Guard
        Decides whether the model got worse.
    """

    loss_fn: LossFn
    optimizer_fn: OptimizerFn
    budget: Budget
    policy: str | Policy
    options: TrainerOptions
    guard: Guard

    def adapt(
        self,
        body: Body,
        loader: Iterable[Batch],
        held_out: Sequence[Row],
        classes: ClassMap,
        *,
        profile: CostProfile | None,
        selection: SelectionState,
        seed: tuple[int, ...],
        at: int,
        drift: bool,
    ) -> Outcome:
        """Train ``body`` on ``loader``; if the outcome says that it was undone, the weights are restored.

        Torch's random numbers, as in dropout, depend on the seed alone; its global random state is unchanged.

        Raises
        ------
        BudgetError
            If the budget does not even admit the head.
        """
        module, manifest = body.module, Manifest.of(body.module, whole=True)
        weights = weights_of(module, manifest)
        before = score(body, self.loss_fn, held_out, classes)
        number = int(np.random.default_rng(seed).integers(2**31))
        trainer = ElasticTrainer(
            module, self.loss_fn, self.optimizer_fn, budget=self.budget, policy=self.policy,
            profile=profile, options=replace(self.options, seed=number),
            state=deepcopy(selection),
        )  # fmt: skip
        facts: dict[str, Any] = {"trained": (), "groups": 0, "steps": 0, "loss": float("nan")}
        facts |= {"seconds": 0.0, "selection_seconds": 0.0}
        try:
            with _seeded(number):
                module.train()
                report = trainer.fit(loader)
        except TrainingError as error:
            undone = str(error)
        except BaseException:
            # Stopping the process, too, must not leave half an adaptation.
            load_weights(module, manifest, weights)
            raise
        else:
            names = [group.name for group in report.plan.groups]
            facts |= {
                "trained": tuple(n for n, on in zip(names, report.plan.mask, strict=True) if on),
                "groups": len(names), "steps": report.steps, "loss": report.loss,
                "seconds": report.seconds, "selection_seconds": report.selection_seconds,
            }  # fmt: skip
            undone = ""
        finally:
            module.eval()
        undone = undone or self._broken(module, loader)
        after = before if undone else score(body, self.loss_fn, held_out, classes)
        undone = undone or self.guard.worse(before, after)
        if undone:
            load_weights(module, manifest, weights)
        done = Adaptation(at=at, drift=drift, before=before, after=after, undone=undone, **facts)
        return Outcome(done, trainer.profile, selection if undone else trainer.state)

    def _broken(self, module: nn.Module, loader: Iterable[Batch]) -> str:
        """Return why the model is unusable, whatever the held-out window says; empty if it is usable."""
        if not all(all_finite(each) for each in module.parameters()):
            return "a weight is no longer finite"
        with torch.no_grad():
            batch = to_device(next(iter(loader)), model_device(module))
            loss = float(compute_loss(module, self.loss_fn, batch))
        return "" if math.isfinite(loss) else f"the loss of a training batch became {loss}"


def score(body: Body, loss_fn: LossFn, rows: Sequence[Row], classes: ClassMap) -> Score:
    """Return loss and accuracy on held-out samples."""
    if not rows:
        return Score(0.0, 0.0, 0)
    with torch.no_grad():
        inputs = body.as_inputs(np.stack([row.x for row in rows]))
        outputs = scores_of(call_model(body.module, inputs))
        targets = torch.from_numpy(classes.outputs(np.array([row.y for row in rows], np.int64)))
        targets = targets.to(outputs.device)
        right = int((outputs[:, : len(classes)].argmax(1) == targets).sum())
        loss = one_number(loss_fn(outputs, targets))
        return Score(float(loss), right / len(rows), len(rows))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with preserved_rng():
        torch.manual_seed(seed)
        yield
