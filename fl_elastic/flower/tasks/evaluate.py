"""Evaluate the model on the client's test data. `fl_elastic.flower.evaluation_replies` collects the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.metrics import refuse_metrics
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.groups import Batch


@dataclass(frozen=True)
class Evaluate(RoundTask):
    """Return loss, accuracy and the user's metrics on the test loader."""

    name: ClassVar[str] = "evaluate"
    message_type: ClassVar[str] = "evaluate"
    known_to_flower: ClassVar[bool] = True
    reveals_data: ClassVar[bool] = False
    """It reveals no more than any evaluation."""

    def answer(self, work: ClientRound) -> Answer:
        """Evaluate the model, on kept features of the test data at the fleet's cut if there are any."""
        from fl_elastic.training import evaluate

        client, data = work.client, work.data
        with _above_cut(work) as running:
            found = evaluate(
                data.model, data.loss_fn, data.tests,
                metrics_fn=client.metrics_fn, running=running,
                count_examples=client.options.count_examples,
            )  # fmt: skip
        accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
        refuse_metrics(found.metrics)
        return Answer([], found.num_examples, {**accuracy, **found.metrics}, found.loss)


@contextmanager
def _above_cut(
    work: ClientRound,
) -> Iterator[Callable[[Batch], AbstractContextManager[None]] | None]:
    """Yield a function that runs a batch on kept features above the cut; None if features are not kept.

    Features of the test data have a file of their own, because a fit deletes features of examples that it does not
    meet.
    """
    options, profile, tests = work.options, work.known_profile(), work.data.tests
    forward = options.forward
    lasts = forward is not None and forward.path is not None and forward.feature_bytes
    if not options.part.cut or profile is None or not lasts or not isinstance(tests, Sized):
        yield None
        return
    from fl_elastic.flower.client_state import features_of_tests
    from fl_elastic.training.above_cut import passing_above_cut

    assert forward is not None and forward.path is not None
    tested = replace(forward, path=features_of_tests(Path(forward.path)))
    options = replace(options, forward=tested)
    with passing_above_cut(work.data.model, tests, profile.graph, options) as kept:
        yield kept.step
