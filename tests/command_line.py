"""The command line, called in this process as the installed script calls it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fl_elastic.cli.main import app, main

COMMAND: click.Command = typer.main.get_command(app)
"""All commands, put together once: each call of the installed script does so for itself."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    def is_one_line_of_error(self) -> bool:
        """Whether it failed with one clear line and nothing else."""
        return self.is_error_of_lines(1)

    def is_error_of_lines(self, count: int) -> bool:
        """Whether it failed with so many lines; several mistakes have one each below a heading."""
        lines = self.err.splitlines()
        return (
            self.status == 1
            and not self.out
            and len(lines) == count
            and lines[0].startswith("error: ")
            and all(line.startswith("  ") for line in lines[1:])
            and "Traceback" not in self.err
        )


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> Ended:
    # What the command changes of Flower's logger, it changes for its own process.
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setattr(sys, "argv", ["fl-elastic", *map(str, arguments)])
    monkeypatch.setattr(sys.modules["fl_elastic.cli.main"], "app", COMMAND)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    code = ended.value.code
    return Ended(code if isinstance(code, int) else int(code is not None), *captured)


def result(ended: Ended) -> dict[str, Any]:
    """The JSON of a command that ended well."""
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def module_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> Callable[..., Ended]:
    """Return a call of the command line in a folder with a module, which arguments name as ``mine:``."""
    name = f"module_{folder.name}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    # The command puts the working directory there.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)

    def called(*arguments: object) -> Ended:
        own = (str(each).replace("mine:", f"{name}:") for each in arguments)
        return call(monkeypatch, capsys, *own)

    return called
