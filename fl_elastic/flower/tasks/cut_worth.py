"""Rate the possible cuts of the model: what training down to each would gain. `FleetCut` collects the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.flower.records import IMPORTANCE
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient


@dataclass(frozen=True)
class RateCuts(RoundTask):
    """Say what training down to each place of the model would gain."""

    name: ClassVar[str] = "cut-worth"

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Return the gain by the deepest group that is trained, as a metric."""
        return Answer.packed(b"", 0, {IMPORTANCE: json.dumps(client.cut_worth(self))})
