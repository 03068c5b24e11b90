"""Describe the device by the costs of its rounds. `ClientRegistry` collects the answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.tasks.task import Answer, RoundTask
from fl_elastic.flower.tasks.train import Train

if TYPE_CHECKING:
    from fl_elastic.flower.capabilities import Capabilities
    from fl_elastic.flower.client_round import ClientRound


@dataclass(frozen=True)
class Describe(RoundTask):
    """Report what the device can do in a round; the message brings no model.

    It travels as an evaluation: Flower's ``query`` messages do not reach a ``NumPyClient``.
    """

    name: ClassVar[str] = "describe"
    message_type: ClassVar[str] = "evaluate"
    brings_model: ClassVar[bool] = False
    reveals_data: ClassVar[bool] = False
    """Only the number of examples is revealed."""

    def answer(self, work: ClientRound) -> Answer:
        """Return the capabilities as metrics; unknown costs are estimated."""
        known = capabilities(work)
        return Answer([], known.num_examples, known.to_metrics())


def capabilities(work: ClientRound) -> Capabilities:
    """Return a client's capabilities for a round with a task; unknown costs are estimated."""
    from fl_elastic.flower.capabilities import Capabilities
    from fl_elastic.training.costs import lasting_costs

    client, options, size = work.client, work.options, work.size()
    profile = work.costs()
    return Capabilities.of(
        lasting_costs(profile, options, size.examples),
        # Without the deadline of this message.
        replace(work, task=Train()).budget,
        device=client.device, num_examples=size.examples,
        steps=size.batches * work.epochs * work.passes(profile, size.examples),
    )  # fmt: skip
