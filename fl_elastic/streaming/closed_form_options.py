"""Settings of a stream's head in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import StreamError


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Settings of a head in closed form that learns from a stream.

    It reads the input of the model's last layer. For a head that reads elsewhere, give the learner the model that
    `fl_elastic.training.read_out.readout_of` makes.

    Parameters
    ----------
    remember : float, optional
        A sample's weight falls to 1/e of a new one's after this many further samples. By default all samples have
        equal weight, so that no order of classes makes the head forget one; 1,000 to 3,000 suit streams whose
        classes change.
    before : HeadSums, optional
        Sums from before the stream, as `fl_elastic.training.head_pass` computes them locally, or from a server.
        They have one column per label in ``classes`` of the learner, in order.

    Examples
    --------
    >>> ClosedForm(remember=1000).remember
    1000
    """

    remember: float | None = None
    before: HeadSums | None = None

    def __post_init__(self) -> None:
        if self.remember is not None and not 1 <= self.remember < math.inf:
            raise StreamError(
                f"remember {self.remember} is invalid: give a number of samples, at least 1, or None for all"
            )
