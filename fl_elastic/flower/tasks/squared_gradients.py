"""Sum squared gradients, which show the server what matters to examples that must be forgotten.

`fl_elastic.flower.forgetting.dampened` collects them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient


@dataclass(frozen=True)
class SumSquaredGradients(RoundTask):
    """Send the squared gradients summed over all examples, and over those to be forgotten."""

    name: ClassVar[str] = "squared-gradients"

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Return both sums, packed."""
        from fl_elastic.methods.dampening.forget import squares_with
        from fl_elastic.update.squared_gradients import encode_squares

        data, examples = client.data, client.data.examples()
        seconds = client.budget_for(self).deadline or math.inf
        everything, forgotten = data.squares(
            lambda loss: squares_with(
                data.model, loss, examples, client.wish,
                examples=client.size(examples).examples, seconds=seconds,
            )
        )  # fmt: skip
        packed = encode_squares(everything, forgotten, client.manifest)
        return Answer.packed(packed, everything.examples)
