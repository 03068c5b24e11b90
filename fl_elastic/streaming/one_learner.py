"""Allow one learner per state folder: two would overwrite each other's state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fl_elastic.errors import StreamError
from fl_elastic.state.files import only_one

__all__ = ["one_learner"]

_LOCK = ".lock"


@contextmanager
def one_learner(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Make a state folder and lock other learners out of it while the context or this process lasts.

    Rounds of the federation do not need the lock: they leave their results in the inbox.

    Raises
    ------
    StreamError
        If another learner is there, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            held.enter_context(only_one(Path(folder) / _LOCK))
        except BlockingIOError:
            raise StreamError(
                f"another fl-elastic stream learns in {folder} now: stop it, or give this one another --state-dir"
            ) from None
        except OSError as error:
            raise StreamError(
                f"cannot write the state folder {folder}: {error.strerror or error}; "
                "check the path and who owns it"
            ) from None
        yield
