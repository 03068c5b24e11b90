"""Limit on the size of a store, so that everything that the stream writes fits the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from fl_elastic.errors import StreamError
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.write_ahead import log_bytes

DEFAULT_CAPACITY = 64 * 2**20
# Bytes of counters, record points and adaptations in a saved state.
_FACTS = 2**16
# Largest number of samples in a saved state: the new ones and the held-out window.
_ROWS = 544
# Everything that a stream writes into its folder, besides the store's files.
_OWN = ("learner.state", "events.log", "profile.state", "summary.json", "report.html", ".lock")
# Spare bytes at a first start: a later start finds a few blocks less free, and must not need a smaller store.
_SPARE = 2**16


def state_bytes(tensors: Iterable[int], row_bytes: int) -> int:
    """Return the approximate bytes of a saved state, from the bytes of each tensor of the model and of a sample."""
    return _FACTS + sum(512 + tensor for tensor in tensors) + _ROWS * row_bytes


def saved_sums_bytes(features: int, outputs: int) -> int:
    """Return the bytes of the running sums of a head in closed form in a saved state.

    >>> saved_sums_bytes(features=2, outputs=3)
    136
    """
    rows = features + 1
    return 8 * (rows * (rows + 1) // 2 + rows * outputs + features)


def fitting_capacity(folder: Path, wanted: int | None, state: int) -> int:
    """Return a capacity with which store and saved state fit onto the disk.

    Parameters
    ----------
    folder : Path
        Folder of the state; it may not exist yet.
    wanted : int or None
        Capacity in bytes that the user asked for; None for `DEFAULT_CAPACITY`, or less if that does not fit.
    state : int
        Bytes of a saved state; counted twice, because a new one is written beside the old one.

    Raises
    ------
    StreamError
        If the wanted capacity does not fit, or not even the smallest store does.
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
    # The log takes an eighth of the capacity, within a lower and an upper limit.
    return max(min(room - log_bytes(0), room * 8 // 9), room - log_bytes(room), 0)


def _free(folder: Path) -> int:
    """Return the bytes that are free, plus those that a stream in this folder already takes."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    own = [each for each in folder.glob("samples.db*") if "damaged" not in each.name]
    own += [folder / name for name in _OWN if (folder / name).exists()]
    # Count whole blocks, as the disk does; a file of 29,574 bytes takes 32,768.
    taken = sum(512 * each.stat().st_blocks for each in own)
    return shutil.disk_usage(there).free + taken
