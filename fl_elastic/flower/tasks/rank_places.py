"""Send samples by which the server ranks the places that the head may read.

`fl_elastic.flower.round_zero_places` collects the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.errors import TrainingError
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound


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

    def answer(self, work: ClientRound) -> Answer:
        """Return the features, packed, as the principal axes of their folds."""
        from fl_elastic.readout.place import Reading
        from fl_elastic.readout.places_wire import encode_places
        from fl_elastic.training.places_reply import places_reply

        client, data = work.client, work.data
        if client.why_reading_is_fixed:
            raise TrainingError(client.why_reading_is_fixed)
        examples = work.size().examples
        reply = places_reply(
            data.model, data.batches, Reading.parse(self.places), examples=max(self.examples, 1),
            of_all=examples, budget=work.budget, names=work.data.manifest.index,
            clock=client.options.timing.clock, loss_fn=data.loss_fn, metrics_fn=client.metrics_fn,
        )  # fmt: skip
        return Answer.packed(encode_places(reply, work.data.manifest), examples)
