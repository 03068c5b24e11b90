"""Sum squared gradients, which show the server what matters to examples that must be forgotten.

`fl_elastic.flower.forgetting.dampened` collects them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound


@dataclass(frozen=True)
class SumSquaredGradients(RoundTask):
    """Send the squared gradients summed over all examples, and over those to be forgotten."""

    name: ClassVar[str] = "squared-gradients"

    def answer(self, work: ClientRound) -> Answer:
        """Return both sums, packed."""
        from fl_elastic.methods.dampening.forget import squares_with
        from fl_elastic.update.squared_gradients import encode_squares

        data, examples = work.data, work.data.examples()
        seconds = work.budget.deadline or math.inf
        everything, forgotten = data.squares(
            lambda loss: squares_with(
                data.model, loss, examples, work.client.unlearning.examples,
                examples=work.size(examples).examples, seconds=seconds,
            )
        )  # fmt: skip
        packed = encode_squares(everything, forgotten, work.data.manifest)
        return Answer.packed(packed, everything.examples)
