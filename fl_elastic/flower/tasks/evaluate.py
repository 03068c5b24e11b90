"""Evaluate the model on the client's test data. `fl_elastic.flower.evaluations` collects the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.flower.records import refuse_metrics
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient

__all__ = ["Evaluate"]


@dataclass(frozen=True)
class Evaluate(RoundTask):
    """Return loss, accuracy and the user's metrics on the test loader."""

    name: ClassVar[str] = "evaluate"
    message_type: ClassVar[str] = "evaluate"
    known_to_flower: ClassVar[bool] = True

    @property
    def reveals_data(self) -> bool:
        """False: it reveals no more than any evaluation."""
        return False

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Evaluate the model, on kept features of the test data at the fleet's cut if there are any."""
        from fl_elastic.training import evaluate

        data = client.data
        with client.testing_above_cut(self) as running:
            found = evaluate(
                data.model, data.loss_fn, data.tests,
                metrics_fn=client.metrics_fn, running=running,
                count_examples=client.options.count_examples,
            )  # fmt: skip
        accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
        refuse_metrics(found.metrics)
        return Answer([], found.num_examples, {**accuracy, **found.metrics}, found.loss)
