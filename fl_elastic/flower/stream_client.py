"""A client that trains on the samples of a stream, and leaves the result for the stream's learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamError
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.client_round import ClientRound, RoundData
from fl_elastic.flower.stream_data import StreamData, StreamSettings, shares_to_try
from fl_elastic.flower.stream_update import HeadLayout, below_cut, refuse_other_features
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import LossFn
from fl_elastic.losses import classification_loss
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.streaming.body import Prepare, as_floats
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.saved_learner import load_snapshot
from fl_elastic.streaming.stream_options import Replay
from fl_elastic.update import Manifest


class StreamClient(ElasticClient):
    """Takes part in rounds with the samples of a stream, beside the learner of that stream.

    In each round the global model is joined with the model that the learner saved (a weighted mean), and trained
    within the budget on samples of the store; the changes are sent. For the learner the client leaves the joined
    model plus a part of each tensor's change in training: one minus the global model's share of that tensor. The
    learner adopts it at its next sample if it is no worse. Learner and client may be different processes: they
    share only the state folder.

    If the fleet has a cut, tensors below it are those of the global model, and only tensors above it are joined.
    Features at the cut are kept as long as the store has their samples. A learner with latent replay can take part
    if its frozen part ends at the fleet's cut or below and equals the global model's bit by bit: rounds train on
    the features in its store, and new features are stored in the precision that the server asks for. Sums for a
    head in closed form cover every labelled sample once; a learner whose own head is in closed form has them
    without a pass over its samples.

    Parameters
    ----------
    model : nn.Module
        The server's model.
    stream_dir : path-like
        State folder of the `StreamLearner`, with its store ``samples.db`` in it.
    budget : Budget
        What one round may spend.
    joining : {"measured", "replace"} or sequence of float
        Share of the global model in the joined one. ``measured``: of five shares from 0 to 1, the one with the best
        accuracy on samples that the learner has not trained on. ``replace``: 1. A sequence of shares: the best of
        them by the same measure.
    classes : sequence of int, optional
        Labels of the server's outputs, in order; by default 0, 1, 2 and so on.
    optimizer_fn, loss_fn : callable
        As in `ElasticClient`.
    replay : Replay, optional
        Size of a batch, and how many of its rows come from the store; by default half of 32.
    steps : int
        Training steps of a round, if the budget pays for them.
    prepare, seed
        As in the learner.
    **settings
        Further arguments of `ElasticClient`; ``state_dir`` is by default the folder ``rounds`` in ``stream_dir``.

    Raises
    ------
    StreamError
        If a setting is invalid.

    Examples
    --------
    >>> client = StreamClient(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), "state", budget=Budget(speedup=2))
    >>> client.fit([], {"fl_elastic.packed": True})[2]["fl_elastic.error"]
    'expected one packed buffer, got 0 arrays'
    """

    why_reading_is_fixed: ClassVar[str] = (
        "the learner of a stream keeps the model that it was given: use read='last', or give learner and client a "
        "Readout from these places"
    )

    def __init__(
        self,
        model: nn.Module,
        stream_dir: str | Path,
        *,
        budget: Budget,
        joining: str | Sequence[float] = "measured",
        classes: Sequence[int] | None = None,
        optimizer_fn: OptimizerFn | None = None,
        loss_fn: LossFn = classification_loss,
        replay: Replay | None = None,
        steps: int = 20,
        prepare: Prepare = as_floats,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        folder = Path(stream_dir)
        if optimizer_fn is not None:
            settings["optimizer_fn"] = optimizer_fn
        settings.setdefault("state_dir", folder / "rounds")
        super().__init__(model, [], [], budget=budget, loss_fn=loss_fn, **settings)
        # A learner keeps and joins the whole model, including its frozen parameters.
        self.state.go_by(Manifest.of(model, whole=True))
        self._prepare = prepare
        blank = Classifier(model, loss_fn, (), latent=None, prepare=prepare, seed=seed)
        layout = HeadLayout.of(blank, self.manifest)
        outputs = self.manifest.shape(layout.head[0])[0]
        known = tuple(range(outputs)) if classes is None else tuple(classes)
        if len(set(known)) != len(known) or len(known) > outputs:
            raise StreamError(
                f"{len(known)} classes for {outputs} outputs: give each class once, and no more than outputs"
            )
        self._settings = StreamSettings(
            folder, layout, known, loss_fn, shares_to_try(joining), replay or Replay(),
            steps, seed,
        )  # fmt: skip

    def forget(self, ids: Iterable[int]) -> None:
        """Raise StreamError: only the learner of a stream can forget samples, by its own method."""
        raise StreamError(
            "the samples of a stream are the learner's: let it forget them, by StreamLearner.forget or "
            "fl-elastic stream forget"
        )

    @contextmanager
    def _opened(
        self, task: RoundTask, weights: Mapping[str, NDArray[Any]] | None
    ) -> Iterator[RoundData]:
        """Yield the samples of the stream, and the learner's model joined with the server's."""
        settings = self._settings
        seen = load_snapshot(
            settings.folder, self.model, settings.loss_fn,
            prepare=self._prepare, seed=settings.seed,
        )  # fmt: skip
        with seen.store:
            data = StreamData.of(settings, seen, self.manifest)
            if weights is not None:
                if seen.upper is not None:
                    refuse_other_features(seen.upper, task, weights, seen.saved.weights)
                trains = isinstance(task, (Train, Evaluate))
                fixed = self._fixed_tensors(ClientRound(self, task, data), trains=trains)
                data = data.with_server(weights, fixed, trains=trains)
            yield data

    def _fixed_tensors(self, work: ClientRound, *, trains: bool) -> frozenset[str]:
        """Return the names of the tensors that are taken unchanged from the global model."""
        layout, names, task = self._settings.layout, set[str](), work.task
        if task.cut and trains:
            graph = work.costs().graph
            names = below_cut(graph, task.cut, self.manifest.names, layout)
        if task.kept_head:
            names |= {*layout.head}
        return frozenset(names)
