"""What the clients of a simulation know of each group's importance, out of what they keep from round to round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fl_elastic.flower.client_state import ClientState
from fl_elastic.update import Manifest

__all__ = ["known_importance"]


def known_importance(folders: Iterable[Path], manifest: Manifest) -> dict[str, float]:
    """Return each group's share of importance, the mean over the clients that have measured all groups.

    What would increase the loss counts as nothing, as in what a client reports to a server.

    Parameters
    ----------
    folders : iterable of Path
        State folder of each client; one that keeps no scores does not count.
    manifest : Manifest
        Of the model.

    Returns
    -------
    dict of str to float
        By group, in backward order; the shares add up to 1. Empty if no client knows all groups.
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
