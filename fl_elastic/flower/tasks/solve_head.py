"""Compute the sums from which a head in closed form is solved.

`fl_elastic.flower.round_zero` collects the sums, `fl_elastic.flower.private_round_zero` those that hide examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.closed_form.head_sums import HeadSums
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.training.report import ForwardReport


# Sums over a fold of fewer examples would almost reveal the examples themselves.
_TOGETHER = 8


@dataclass(frozen=True)
class SolveHead(RoundTask):
    """Send the sums over the client's examples from which the server solves for the head.

    Attributes
    ----------
    fixed_point : str
        Format of the sums for secure aggregation, `fl_elastic.closed_form.secret_sums.FixedPoint` as JSON; empty if
        the server reads the sums.
    clip : float, optional
        Length to which features are scaled down, for differential privacy.
    noise : float, optional
        Standard deviation of the noise that the client adds; if left out, the server adds it.
    """

    fixed_point: str = ""
    clip: float | None = None
    noise: float | None = None

    name: ClassVar[str] = "solve-head"

    @property
    def reveals_data(self) -> bool:  # type: ignore[override]
        """Whether neither noise nor secure aggregation covers the sums."""
        return self.noise is None and not self.fixed_point

    def answer(self, work: ClientRound) -> Answer:
        """Return the sums, packed; with noise, or as numbers for secure aggregation, if the task says so."""
        if self.fixed_point:
            from fl_elastic.flower.private_round_zero import secret_answer

            return secret_answer(work, self)
        if self.noise is not None:
            from fl_elastic.flower.private_round_zero import noisy_answer

            return noisy_answer(work, self)
        from fl_elastic.closed_form.head_sums_wire import encode_head_sums
        from fl_elastic.training.model_head import refuse_frozen_head

        sums, examples, forward = _exact_sums(work)
        refuse_frozen_head(work.data.model, sums.weight, work.data.manifest.index)
        metrics = {} if forward is None else forward.to_metrics()
        return Answer.packed(encode_head_sums(sums, work.data.manifest), examples, metrics)


def _exact_sums(
    work: ClientRound,
) -> tuple[HeadSums, int, ForwardReport | None]:
    """Return the sums for a head, the number of examples that they represent, and a report on the frozen prefix.

    Features at the fleet's cut are stored during the pass.
    """
    from fl_elastic.training.above_cut import head_sums_above_cut

    data = work.data
    known = data.known_sums()
    if known is not None:
        return known, known.num_examples, None
    options, examples = work.options, data.examples(of_server=True)
    keeps = options.forward is not None and options.part.cut
    graph = work.costs().graph if keeps else None
    sums, inputs, forward = head_sums_above_cut(
        data.model, examples, graph, options,
        seconds=work.budget.deadline or math.inf, together=_TOGETHER,
        loss_fn=data.loss_fn,
    )  # fmt: skip
    # One input may have many targets, such as tokens, or none.
    share = 1.0 if inputs is None else min(inputs / max(work.size(examples).examples, 1), 1.0)
    return data.in_server_order(sums), round(sums.num_examples / share), forward
