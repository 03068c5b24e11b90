"""Examples as a user has them: copied out of the repository, and run from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def copied(name: str, place: Path) -> Path:
    """A copy of an example in a folder outside of the repository."""
    ignored = shutil.ignore_patterns("__pycache__", ".mypy_cache", ".ruff_cache")
    return Path(shutil.copytree(EXAMPLES / name, place / name, ignore=ignored))


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of an example's README in one language."""
    text = (EXAMPLES / name / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the commands of its Python first and nothing that reaches outside."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
        **changes,
    }


def ran(place: Path, *command: str, seconds: float = 300, **changes: str) -> str:
    """What a command printed, on both ways out, that ended well."""
    ended = subprocess.run(
        command, cwd=place, env=environment(**changes), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
