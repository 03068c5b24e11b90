"""Tasks for forgetting examples: sum squared gradients, and measure the loss of the dampened model.

`fl_elastic.flower.forgetting.dampened` collects the squared gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.errors import TrainingError
from fl_elastic.flower.records import LOSS
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.groups import Batch


@dataclass(frozen=True)
class SumSquaredGradients(RoundTask):
    """Send the squared gradients summed over all examples, and over those to be forgotten."""

    name: ClassVar[str] = "squared-gradients"

    def answer(self, work: ClientRound) -> Answer:
        """Return both sums, packed."""
        from fl_elastic.methods.dampening.forget import squares_with
        from fl_elastic.update.dampening import encode_squares

        data, examples = work.data, work.data.examples()
        seconds = work.budget.deadline or math.inf
        everything, forgotten = data.squares(
            lambda loss: squares_with(
                data.model, loss, examples, work.client.forget_request.examples,
                examples=work.size(examples).examples, seconds=seconds,
            )
        )  # fmt: skip
        packed = encode_squares(everything, forgotten, work.data.manifest)
        return Answer.packed(packed, everything.examples)


@dataclass(frozen=True)
class MeasureLoss(RoundTask):
    """Report the model's loss on the client's training examples."""

    name: ClassVar[str] = "loss"

    def answer(self, work: ClientRound) -> Answer:
        """Return the loss as a metric, over the examples for which there is time."""
        from fl_elastic.training.evaluate import evaluate

        data, seconds = work.data, work.budget.deadline or math.inf
        found = evaluate(data.model, data.loss_fn, _in_time(data.examples(), seconds))
        if not math.isfinite(found.loss):
            raise TrainingError(f"loss is {found.loss} with the server's model")
        return Answer.packed(b"", found.num_examples, {LOSS: found.loss})


def _in_time(batches: Iterable[Batch], seconds: float) -> Iterator[Batch]:
    """Yield batches until this many seconds have passed; at least one batch."""
    until = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() > until:
            break
