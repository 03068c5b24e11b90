"""Train within the budget: the task of an ordinary round. `ReplyMerger` collects the updates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError, UpdateError
from fl_elastic.flower.records import FORGET, IMPORTANCE, MAY_TRAIN, PACKED, TENSORS
from fl_elastic.flower.tasks.task import Answer, RoundTask, config_key

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.profiling import CostProfile
    from fl_elastic.training import ElasticTrainer, FitReport


def summable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a form that Flower's secure aggregation adds up correctly.

    Zero-dimensional arrays get a dimension, because its in-place operations have no effect on them. Half-precision
    arrays become fp32, because its scaling of numbers would overflow.

    >>> summable(np.array(1.5, np.float16))
    array([1.5], dtype=float32)
    """
    half = array.dtype.kind == "f" and array.dtype.itemsize < 4
    return np.atleast_1d(array.astype(np.float32) if half else array)


@dataclass(frozen=True)
class Train(RoundTask):
    """Train within the budget, and send the update.

    Attributes
    ----------
    groups : str
        Names of the groups to train, as a JSON list, chosen by the server from the importance that clients report;
        empty to let the client choose.
    keep_statistics : bool
        Whether norms keep their statistics.
    rate : float
        Factor of the optimiser's learning rate, in (0, 1].
    lr : float, optional
        Learning rate that replaces the optimiser's own, under the key that Flower's apps use for it.
    forgotten : str
        Digest of the client's request to have examples forgotten, if the server has met it; empty otherwise.
    """

    groups: str = ""
    keep_statistics: bool = False
    rate: float = 1.0
    lr: float | None = None
    forgotten: str = ""

    name: ClassVar[str] = "train"
    known_to_flower: ClassVar[bool] = True
    reveals_data: ClassVar[bool] = False
    """It reveals no more than the optimiser's steps."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UpdateError(
                f"config {config_key('rate')} = {self.rate} is not above 0 and at most 1"
            )

    def answer(self, work: ClientRound) -> Answer:
        """Train with a new optimiser, without momentum from earlier rounds; return the update."""
        client, data = work.client, work.data
        if client.forget_request.pending:
            client.state.forget_examples(client.forget_request.digest(client.client_id))
        options, profile = work.options, work.known_profile()
        # An unknown profile is estimated inside the fit, where its time counts against the budget.
        epochs = work.epochs
        if profile is not None and options.part.cut:
            epochs *= work.passes(profile, work.size().examples)
        trainer = self._trainer(work, profile)
        data.model.train()
        report = trainer.fit(data.batches, epochs=epochs)
        update = data.update(trainer, work.version)
        metrics = self._metrics(work, trainer, report)
        client.state.keep_selection(wanted=trainer.planner.policy.needs_coverage)
        if trainer.profile is not None and trainer.profile is not profile:
            # The fit has added the costs of the policy's modes.
            client.state.keep_profile(trainer.profile, data.model)
        if work.config.get(PACKED):
            packed = client.state.encoded(update, client.codec)
            return Answer.packed(packed, update.num_examples, metrics, report)
        weights = data.weights()
        if self.groups:
            # Secure aggregation sums the same tensors of all clients.
            trained = [name for name in work.data.manifest.names if name in update.deltas]
            metrics[TENSORS] = json.dumps([work.data.manifest.index[name] for name in trained])
            weights = {name: summable(weights[name]) for name in trained}
        return Answer([*weights.values()], update.num_examples, metrics, report=report)

    def _trainer(self, work: ClientRound, profile: CostProfile | None) -> ElasticTrainer:
        """Return the trainer of the round: with the server's groups, if it has chosen them."""
        # Imported here: a server makes this task, too, and trains nothing.
        from fl_elastic.training import ElasticTrainer

        client, data, policy = work.client, work.data, work.client.policy
        if self.groups:
            from fl_elastic.planning.plain import GivenPolicy

            policy = GivenPolicy(read_groups(self.groups))
        return ElasticTrainer(
            data.model, data.loss_fn, work.optimizer_fn,
            budget=work.budget_left, policy=policy, profile=profile, options=work.options,
            state=client.state.selection, manifest=work.data.manifest,
        )  # fmt: skip

    def _metrics(
        self, work: ClientRound, trainer: ElasticTrainer, report: FitReport
    ) -> dict[str, Any]:
        """Return the metrics of a fit that are sent with its update."""
        metrics = report.to_metrics()
        if self.cut and report.forward is not None:
            metrics |= report.forward.to_metrics()
        if self.cut or self.kept_head:
            indices = sorted(work.data.manifest.index[name] for name in trainer.may_train)
            metrics[MAY_TRAIN] = json.dumps(indices)
        request, name = work.client.forget_request, work.client.client_id
        request.confirm(name, self.forgotten)
        if request.pending:
            metrics[FORGET] = request.digest(name)
        if self.groups and trainer.state.complete:
            # Sent only when every group has a score: otherwise the rest would look worthless. A negative score is
            # sent as zero, because the server would refuse all scores over one negative score.
            worth = {name: max(score, 0.0) for name, score in report.importance.items()}
            metrics[IMPORTANCE] = json.dumps(worth)
        return metrics


def read_groups(text: str) -> tuple[str, ...]:
    """Return the names in ``groups`` of `Train`; raise PlanError if it is not a list of names.

    >>> read_groups('["head", "conv"]')
    ('head', 'conv')
    """
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"groups {text[:40]!r} cannot be read: {error}") from None
    return tuple(names)
