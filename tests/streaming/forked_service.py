"""``fl-elastic stream`` in a forked process: a life costs no start of an interpreter, so that many can be ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import typer
from torch import nn

from fl_elastic.cli.stream import stream


def small_net() -> nn.Module:
    """Two layers; the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def table() -> nn.Module:
    """One layer; what enters it are the rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2))


def arguments(folder: Path, source: str, *more: object) -> list[str]:
    """What the command is given."""
    given = [
        "--source", source, "--model", "forked_service:small_net", "--input", "4",
        "--state-dir", folder / "state", "--policy", "full", "--every", "60", "--steps", "2",
        "--json", *more,
    ]  # fmt: skip
    return [str(each) for each in given]


class Life:
    """A service from its start to its end.

    Parameters
    ----------
    given : list of str
        What the command is given.
    said : Path
        Where its words go.
    """

    alive: ClassVar[set[int]] = set()

    def __init__(self, given: list[str], said: Path) -> None:
        self.said = said
        self.pid = os.fork()
        if self.pid == 0:
            self._live(given)
        self.alive.add(self.pid)

    @classmethod
    def end_all(cls) -> None:
        """End those that a failed test has left."""
        for pid in list(cls.alive):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            cls.alive.discard(pid)

    def _live(self, given: list[str]) -> None:
        status = 1
        try:
            words = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(words, 1)
            os.dup2(words, 2)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False)
            torch.set_num_threads(1)
            app = typer.Typer()
            app.command()(stream)
            app(given, standalone_mode=False)
            status = 0
        except BaseException as error:
            print(f"error: {type(error).__name__}: {error}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def is_over(self) -> bool:
        """Whether it has ended by itself."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def waits_for(self, sign: Callable[[], bool]) -> None:
        """Wait for a sign of life; AssertionError if it ends without one."""
        while not sign():
            assert not self.is_over(), self.said.read_text()
            time.sleep(0.002)

    def kill(self) -> None:
        """End it as a power cut does."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.alive.discard(self.pid)

    def stop(self) -> int:
        """Tell it to end, and return its status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end, and return its status."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.alive.discard(self.pid)
        return status
