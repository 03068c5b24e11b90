"""How large a store may become on this disk, with all that lies beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from fl_elastic.errors import StreamError
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.write_ahead import log_bytes

__all__ = ["DEFAULT_CAPACITY", "fitting_capacity", "state_bytes", "sums_bytes"]

DEFAULT_CAPACITY = 64 * 2**20
# Counters, points and adaptations of a saved state.
_FACTS = 2**16
# Samples that a saved state holds at most: the new ones and the window.
_ROWS = 544
# All that a stream writes into its folder, besides the store's files.
_OWN = ("learner.state", "events.log", "profile.state", "summary.json", "report.html", ".lock")
# Left over by a first start, so that a later one, which finds a few blocks less, needs no smaller store.
_SPARE = 2**16


def state_bytes(tensors: Iterable[int], row_bytes: int) -> int:
    """Return about what a saved state takes, from the bytes of each tensor of the model and of a sample."""
    return _FACTS + sum(512 + each for each in tensors) + _ROWS * row_bytes


def sums_bytes(features: int, outputs: int) -> int:
    """Return what the running sums of a head in closed form take in a saved state.

    >>> sums_bytes(features=2, outputs=3)
    136
    """
    rows = features + 1
    return 8 * (rows * (rows + 1) // 2 + rows * outputs + features)


def fitting_capacity(folder: Path, wanted: int | None, state: int) -> int:
    """Return the capacity of a store that fits onto the disk, so that no save fails for want of room.

    Parameters
    ----------
    folder : Path
        Of the state; it may not exist yet.
    wanted : int or None
        What the user asked for; None for `DEFAULT_CAPACITY`, or less where that does not fit.
    state : int
        Bytes of a saved state: a new one is written beside the old one.

    Raises
    ------
    StreamError
        If what is wanted does not fit, or not even the smallest store does.
    """
    free = _free(folder)
    spare = 0 if (folder / "samples.db").exists() else _SPARE
    most = _most(free - 2 * state - spare)
    if wanted is not None and wanted <= most:
        return wanted
    if wanted is None and most >= LEAST_CAPACITY:
        return min(most, DEFAULT_CAPACITY)
    capacity = LEAST_CAPACITY if wanted is None else wanted
    advice = f"give --capacity {most} or less, or " if most >= LEAST_CAPACITY else ""
    raise StreamError(
        f"the disk of {folder} has {free} bytes for the stream, but a store of {capacity} bytes and the learner's "
        f"state need {capacity + log_bytes(capacity) + 2 * state + spare}: {advice}make room"
    )


def _most(room: int) -> int:
    """Return the largest capacity that leaves room for the log beside the store.

    >>> all(size + log_bytes(size) <= room for room in (2**18, 2**20, 2**30) for size in [_most(room)])
    True
    """
    # The log is an eighth of the capacity, but neither less nor more than so much.
    return max(min(room - log_bytes(0), room * 8 // 9), room - log_bytes(room), 0)


def _free(folder: Path) -> int:
    """Return the bytes that are free, or that a stream there has taken already."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    own = [each for each in folder.glob("samples.db*") if "damaged" not in each.name]
    own += [folder / name for name in _OWN if (folder / name).exists()]
    # What they take in whole blocks; a size of 29,574 bytes takes 32,768.
    taken = sum(512 * each.stat().st_blocks for each in own)
    return shutil.disk_usage(there).free + taken
