"""Which weights are made smaller, and by how much, so that a model forgets examples: the rule of dampening."""

from __future__ import annotations

import math
import numbers

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.squared_gradients import SquaredGradients, refuse_what_is_no_part

# Most weights from which a percentile is computed: in larger models, every second or third weight suffices.
_LOOKED_AT = 4_000_000
_NEARLY = 1e-3
_Floats = NDArray[np.float32]


def dampening(
    forgotten: SquaredGradients,
    everything: SquaredGradients,
    *,
    alpha: float | None = None,
    strength: float = 1.0,
) -> dict[str, _Floats]:
    r"""Return the factor by which each weight is to be multiplied, 1 for most.

    With mean squares :math:`I_f` and :math:`I_D`, a weight with :math:`I_f > \alpha I_D` is multiplied by
    :math:`\min(1, \lambda I_D / I_f)`. Since all examples contain the forgotten ones, :math:`I_f / I_D` is at most
    their number over that of the forgotten ones.

    Parameters
    ----------
    forgotten, everything : SquaredGradients
        Sums of the same parameters: for the examples to be forgotten, and for all examples of the training,
        including these.
    alpha : float, optional
        Above 0. A smaller value forgets more and damages more of the rest. By default `alpha_by_share` computes it.
    strength : float
        :math:`\lambda`, above 0.

    Raises
    ------
    UpdateError
        If a number is invalid, ``everything`` does not contain ``forgotten``, or ``alpha`` is so large that it
        selects no weight.

    Examples
    --------
    >>> few = SquaredGradients({"weight": np.float32([8.0, 1.0])}, 1)
    >>> dampening(few, SquaredGradients({"weight": np.float32([8.0, 4.0])}, 4))["weight"].tolist()
    [0.25, 1.0]
    """
    for name, number in {"alpha": 1.0 if alpha is None else alpha, "strength": strength}.items():
        if not isinstance(number, numbers.Real) or not 0 < number < math.inf:
            raise UpdateError(
                f"{name} {number!r} must be above 0 and finite: give a number such as 3.0"
            )
    most = everything.examples / forgotten.examples
    if alpha is None:
        if most <= 1:
            raise UpdateError(
                f"{forgotten.examples} of {everything.examples} examples are to be forgotten: nothing matters to "
                "these more than to all; give all examples that the model was trained on, or train a new model"
            )
        alpha = alpha_by_share(forgotten, everything)
    if alpha >= most:
        raise UpdateError(
            f"alpha {alpha:g} selects nothing: {forgotten.examples} of {everything.examples} examples are to be "
            f"forgotten, so that a weight matters at most {most:.3g} times as much to them; give less than that"
        )
    refuse_what_is_no_part(forgotten, everything)
    factors: dict[str, _Floats] = {}
    for name, squares in forgotten.sums.items():
        own, of_all = squares / forgotten.examples, everything.sums[name] / everything.examples
        selected = own > alpha * of_all
        shrunk = np.minimum(strength * of_all / np.where(selected, own, 1.0), 1.0)
        factors[name] = np.where(selected, shrunk, 1.0).astype(np.float32)
    return factors


def alpha_by_share(forgotten: SquaredGradients, everything: SquaredGradients) -> float:
    r"""Return an alpha such that few weights change if few examples are forgotten.

    It is the percentile :math:`100 - \ln(1 + 100 s)` of :math:`I_f / I_D` over all weights, where :math:`s` is the
    share of the examples that are to be forgotten (Schoepf, Foster and Brintrup, 2024), and at least 1.

    Parameters
    ----------
    forgotten, everything : SquaredGradients
        As for `dampening`.

    Examples
    --------
    >>> few = SquaredGradients({"weight": np.float32(np.arange(101))}, 1)
    >>> everything = SquaredGradients({"weight": np.float32(np.full(101, 100))}, 20)
    >>> round(alpha_by_share(few, everything), 2)  # a twentieth: the percentile is 98.2
    19.64
    """
    share = forgotten.examples / everything.examples
    stride = -(-sum(each.size for each in forgotten.sums.values()) // _LOOKED_AT)
    ratios = [
        np.divide(few, of_all, out=np.zeros(few.shape, np.float32), where=of_all > 0)
        for few, of_all in (
            (squares.ravel()[::stride], everything.sums[name].ravel()[::stride])
            for name, squares in forgotten.sums.items()
        )
    ]
    found = np.percentile(np.concatenate(ratios), 100 - math.log1p(100 * share)) / share
    # Weights that matter to no other example have the largest possible ratio, and there may be many of them.
    return max(min(float(found), (1 - _NEARLY) / share), 1.0)
