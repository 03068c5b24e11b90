"""``fl-elastic init``: write a new project that runs immediately."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fl_elastic.errors import ScenarioError

_TEMPLATES = Path(__file__).with_name("project")
# Names that Flower accepts for an app.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
# Each project gets one of these ports for its server, so that two projects rarely share one.
_FIRST_PORT, _PORTS = 39100, 800
_FILES = {
    "pyproject.toml": "pyproject.toml.md",
    "README.md": "README.md",
    "scenario.toml": "scenario.toml.md",
    "{package}/task.py": "task.py.md",
    "{package}/client_app.py": "client_app.py.md",
    "{package}/server_app.py": "server_app.py.md",
}


def init(
    folder: Annotated[
        Path, typer.Argument(help="Folder to create; its name becomes the project's.")
    ],
) -> None:
    """Write a new project: a Flower app with a model, data, and a scenario to simulate."""
    for path in write_project(folder):
        typer.echo(path)
    typer.echo(f"next: cd {folder}; see README.md there", err=True)


def write_project(folder: Path) -> list[Path]:
    """Write the files of a new project and return their paths.

    Raises
    ------
    ScenarioError
        If the folder's name is not valid for a Flower app, or the folder is not empty.
    """
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ScenarioError(
            f"folder {name!r} gives the project its name, which Flower takes with letters, digits and hyphens, a "
            "letter first, 32 at most: choose another"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ScenarioError(f"{folder} is there already and not empty: choose another folder")
    package = name.lower().replace("-", "_")
    place = folder.resolve().as_posix()
    names = {
        "name": name,
        "package": package,
        # Escaped for use inside quotes in TOML.
        "folder": place.replace("\\", "\\\\").replace('"', '\\"'),
        "port": _FIRST_PORT + zlib.crc32(place.encode()) % _PORTS,
    }
    written = []
    for target, template in {"{package}/__init__.py": "", **_FILES}.items():
        path = folder / target.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = '"""$name."""\n' if not template else (_TEMPLATES / template).read_text("utf-8")
        path.write_text(Template(text).substitute(names), "utf-8")
        written.append(path)
    return written
