"""Describe the device: what its rounds cost. `ClientRegistry` collects the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient


@dataclass(frozen=True)
class Describe(RoundTask):
    """Say what the device can do in a round; no model comes with the question.

    It travels as an evaluation: Flower's ``query`` messages do not reach a ``NumPyClient``.
    """

    name: ClassVar[str] = "describe"
    message_type: ClassVar[str] = "evaluate"
    brings_model: ClassVar[bool] = False

    @property
    def reveals_data(self) -> bool:
        """False: only the number of examples is revealed."""
        return False

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Return the capabilities as metrics; unknown costs are estimated."""
        known = client.capabilities(self)
        return Answer([], known.num_examples, known.to_metrics())
