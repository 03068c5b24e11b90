"""The lock of a state folder: two learners on one folder would lose each other's samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from fl_elastic.errors import StreamError
from fl_elastic.state.files import only_one

_LOCK = ".lock"


class _FolderLock:
    """Keeps other processes out of a folder; ``owner`` is the number of the learner of this process that has it."""

    def __init__(self, folder: Path) -> None:
        self.owner = self.made = 0
        self._folder, self._held = folder, ExitStack()
        try:
            self._held.enter_context(only_one(folder / _LOCK))
        except BlockingIOError:
            raise StreamError(
                f"another process learns in the state folder {folder} now: stop it, or give this one another "
                "folder (--state-dir)"
            ) from None
        except OSError as error:
            raise StreamError(
                f"cannot write the state folder {folder}: {error.strerror or error}; check the path and who owns it"
            ) from None

    def release(self) -> None:
        _LOCKS.pop(self._folder, None)
        self._held.close()


_LOCKS: WeakValueDictionary[Path, _FolderLock] = WeakValueDictionary()


class Ownership:
    """A learner's ownership of its state folder."""

    def __init__(self, lock: _FolderLock, number: int) -> None:
        self._lock, self._number = lock, number

    @property
    def holds(self) -> bool:
        """Whether no later learner of this process has taken the folder over."""
        return self._lock.owner == self._number

    def check(self) -> None:
        """Raise StreamError if a later learner of this process has taken the folder over."""
        if not self.holds:
            raise StreamError(
                "a later StreamLearner of this process has taken over the state folder: use that one, or give each "
                "a folder of its own"
            )

    def end(self) -> None:
        """Unlock the folder, unless a later learner has it."""
        if self.holds:
            self._lock.release()


@contextmanager
def owning(folder: str | os.PathLike[str]) -> Iterator[Ownership]:
    """Yield the ownership of a state folder for a learner that is made inside the block.

    Other processes are kept out until the ownership or this process ends. If a learner of this process has the
    folder, for example from an earlier run of a notebook's cell, it loses the folder if the block succeeds. Rounds
    of a federation do not need the lock, because they leave their results in the inbox.

    Raises
    ------
    StreamError
        If another process has the folder, or it cannot be written.
    """
    path = Path(folder).resolve()
    lock = _LOCKS.get(path) or _FolderLock(path)
    _LOCKS[path] = lock
    lock.made += 1
    number = lock.made
    try:
        yield Ownership(lock, number)
    except BaseException:
        if not lock.owner:
            lock.release()
        raise
    lock.owner = number
