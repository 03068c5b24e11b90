"""How a device fared around the drift of its stream, from whether each prediction was right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_elastic_simulations.benchmarks.stream_metrics import drift_delays, prequential_accuracy

__all__ = ["ClientScore", "client_score", "combined"]

_AFTER, _LEAST, _SHARE, _LEVEL = 200, 20, 0.95, 0.7
_EARLY = 2


@dataclass(frozen=True)
class ClientScore:
    """How one device fared.

    Parameters
    ----------
    drift : int or None
        Where its stream changed; None for never.
    recovery : float
        Samples until its accuracy was back; those until the end of the stream if it never was; NaN without a drift.
    recovered : bool
        Whether it was back.
    level : float
        Samples until it was right in 70 % of all cases, whatever it was before; counted as the recovery.
    before, after : float
        Share of right predictions in the 200 samples before and after the drift.
    late : float
        The same, from the first drift of any device to the end.
    delay : float
        Samples until the drift was noticed; NaN if it was not.
    """

    drift: int | None
    recovery: float
    recovered: bool
    level: float
    before: float
    after: float
    late: float
    delay: float


def client_score(
    hits: Sequence[bool], drift: int | None, first: int, alarms: Sequence[int], fading: float
) -> ClientScore:
    """Return how a device fared.

    Parameters
    ----------
    hits : sequence of bool
        Whether each prediction was right.
    drift : int or None
        Where its stream changes.
    first : int
        Where the first of all streams changes.
    alarms : sequence of int
        Where it noticed a drift.
    fading : float
        Of the prequential accuracy, by which it is back.

    Examples
    --------
    >>> hits = [True] * 50 + [False] * 10 + [True] * 200
    >>> found = client_score(hits, 50, 50, [62], fading=0.9)
    >>> found.recovery, found.recovered, round(found.after, 2), found.delay
    (34.0, True, 0.95, 12.0)
    """
    right = np.asarray(hits, float)
    late = float(right[first:].mean())
    if drift is None:
        return ClientScore(None, math.nan, False, math.nan, math.nan, math.nan, late, math.nan)
    before = float(right[max(drift - _AFTER, 0) : drift].mean())
    # The accuracy in the changed world alone: what came before it would hide the fall.
    since = prequential_accuracy(hits[drift:], fading)
    back, good = (np.flatnonzero(since[_LEAST:] >= aim) for aim in (_SHARE * before, _LEVEL))
    return ClientScore(
        drift=drift,
        recovery=float(_LEAST + back[0] if len(back) else len(since)),
        recovered=bool(len(back)),
        level=float(_LEAST + good[0] if len(good) else len(since)),
        before=before,
        after=float(right[drift : drift + _AFTER].mean()),
        late=late,
        delay=drift_delays(alarms, [drift], len(hits))[0],
    )


def combined(scores: Sequence[ClientScore]) -> dict[str, Any]:
    """Return means over the devices that were hit, over those but the first two, and over the others."""
    hit = sorted((each for each in scores if each.drift is not None), key=lambda s: s.drift or 0)
    spared = [each for each in scores if each.drift is None]
    noticed = [each.delay for each in hit if not math.isnan(each.delay)]
    return {
        "recovery": statistics.fmean(each.recovery for each in hit),
        "late_recovery": statistics.fmean(each.recovery for each in hit[_EARLY:]),
        "to_level": statistics.fmean(each.level for each in hit),
        "late_to_level": statistics.fmean(each.level for each in hit[_EARLY:]),
        "late_after_drift": statistics.fmean(each.after for each in hit[_EARLY:]),
        "recovered": sum(each.recovered for each in hit) / len(hit),
        "before_drift": statistics.fmean(each.before for each in hit),
        "after_drift": statistics.fmean(each.after for each in hit),
        "not_hit": statistics.fmean(each.late for each in spared),
        "not_hit_each": [each.late for each in spared],
        "to_level_each": [each.level for each in hit],
        "recovery_each": [each.recovery for each in hit],
        "after_drift_each": [each.after for each in hit],
        "noticed": len(noticed),
        "delay": statistics.fmean(noticed) if noticed else None,
    }
