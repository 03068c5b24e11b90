"""The clients' knowledge of each group's importance at the end of a simulation, from their state files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fl_elastic.flower.client_state import ClientState
from fl_elastic.update import Manifest

__all__ = ["known_importance"]


def known_importance(folders: Iterable[Path], manifest: Manifest) -> dict[str, float]:
    """Return each group's share of importance, averaged over the clients that have measured all groups.

    Negative importance counts as zero, as in a client's report to a server.

    Parameters
    ----------
    folders : iterable of Path
        State folder of each client; one without scores does not count.
    manifest : Manifest
        Manifest of the model.

    Returns
    -------
    dict of str to float
        Share by group, in backward order; the shares add up to 1. Empty if no client knows all groups.
    """
    shares: dict[str, list[float]] = {}
    for folder in folders:
        known = ClientState(folder, manifest).selection
        worth = [max(score or 0.0, 0.0) for score in known.scores]
        total = math.fsum(worth)
        if known.complete and 0 < total < math.inf:
            for name, score in zip(known.names, worth, strict=True):
                shares.setdefault(name, []).append(score / total)
    return {name: math.fsum(each) / len(each) for name, each in shares.items()}
