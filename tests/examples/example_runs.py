"""Examples by Flower's own command, as their READMEs say."""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from example_copies import EXAMPLES, blocks, copied
from real_processes import (
    binary,
    end,
    environment,
    free_port,
    status_of,
    superlink_of,
    with_all_below,
)

Run = Callable[..., str]
FILES = [
    "pyproject.toml",
    "{package}/task.py",
    "{package}/client_app.py",
    "{package}/server_app.py",
]
SETTINGS = re.compile(r"--federation-config '([^']+)'")


def difference(example: str, package: str, before: str, after: str) -> str:
    """What turns one app of an example into another; their packages begin with the same word."""
    found: list[str] = []
    for file in FILES:
        names = [f"{kind}/{file.format(package=f'{package}_{kind}')}" for kind in (before, after)]
        texts = ((EXAMPLES / example / name).read_text().splitlines() for name in names)
        found += difflib.unified_diff(*texts, *names, lineterm="", n=2)
    return "\n".join(found) + "\n"


@contextmanager
def runs(example: str, tmp_path: Path) -> Iterator[Run]:
    """Yield what runs an app as the README says, and returns what its server printed."""
    place, port = copied(example, tmp_path), free_port()
    env = environment(tmp_path / "home", FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port))
    federation = SETTINGS.findall("".join(blocks(example, "sh")))[0]

    def run(app: str, *more: str) -> str:
        submitted = subprocess.run(
            [binary("flwr"), "run", app, "--stream", "--federation-config", federation, *more],
            env=env, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        said = submitted.stdout + submitted.stderr
        assert submitted.returncode == 0, said
        run_id = re.findall(r"run (\d{5,})", said)[0]
        assert status_of(run_id, (), env, place) == "finished:completed", said
        return said

    try:
        yield run
    finally:
        end(with_all_below(*superlink_of(port)))
