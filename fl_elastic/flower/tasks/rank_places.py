"""Send samples by which the server ranks the places that the head may read.

`fl_elastic.flower.place_choice` collects the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.errors import TrainingError
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient


@dataclass(frozen=True)
class RankPlaces(RoundTask):
    """Send the features of a few examples at each place that the device can afford.

    Attributes
    ----------
    places : str
        Places among which the server chooses; ``auto`` for all, ``auto>512`` for at most 512 features.
    examples : int
        Number of examples to send.
    """

    places: str = "auto"
    examples: int = 1

    name: ClassVar[str] = "rank-places"

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Return the features, packed, as the principal axes of their folds."""
        from fl_elastic.readout.wire import encode_places
        from fl_elastic.training.places_reply import places_reply

        if client.why_reading_is_fixed:
            raise TrainingError(client.why_reading_is_fixed)
        examples = client.size().examples
        reply = places_reply(
            client.data.model, client.data.batches, self.places, examples=max(self.examples, 1),
            of_all=examples, budget=client.budget_for(self), names=client.manifest.index,
            clock=client.options.timing.clock, loss_fn=client.data.loss_fn,
        )  # fmt: skip
        return Answer.packed(encode_places(reply, client.manifest), examples)
