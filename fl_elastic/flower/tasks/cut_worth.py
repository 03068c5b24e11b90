"""Rate the possible cuts of the model by the gain of training down to each. `FleetCut` collects the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.records import IMPORTANCE
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound


@dataclass(frozen=True)
class RateCuts(RoundTask):
    """Report the gain of training down to each place of the model."""

    name: ClassVar[str] = "cut-worth"

    def answer(self, work: ClientRound) -> Answer:
        """Return as a metric the gain of training down to each possible cut, by the deepest trained group."""
        from fl_elastic.training.costs import with_prefix
        from fl_elastic.training.cut_worth import cut_worth

        # With options that keep features, because features will be kept whichever cut is chosen.
        options = replace(work.options, forward=work.forward(True))
        client, model, batches = work.client, work.data.model, work.batches(2)
        profile = with_prefix(work.costs(options), model, batches[0], options.timing.clock)
        client.state.keep_profile(profile, model)
        worth = cut_worth(
            model, work.data.loss_fn, batches, profile, options, work.size().examples,
            optimizer_fn=work.optimizer_fn, memory=client.budget.memory,
        )  # fmt: skip
        return Answer.packed(b"", 0, {IMPORTANCE: json.dumps(worth)})
