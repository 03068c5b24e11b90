"""Measure the size of the code, the part that a device loads, and the calls in one fit and in one round."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low
from typing import Any

import pandas as pd

from fl_elastic.errors import ElasticError, ScenarioError
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.engine import paths_taken

_LOAD = """
import json, sys, time
{statement}
own = [m for m in sys.modules if m.split(".")[0] in ("fl_elastic", "fl_elastic_simulations")]
print(json.dumps({{"modules": len(own), "cpu_seconds": time.process_time()}}))
"""
_LOADED = {
    "client": "import fl_elastic.flower.client",
    "message": "import fl_elastic_simulations.fleet.app, fl_elastic_simulations.fleet.node",
}
_TURNS = 7
_PARTS = {
    "library": "fl_elastic",
    "laboratory": "simulations/fl_elastic_simulations",
    "tests": "tests",
    "laboratory tests": "simulations/tests",
}
_IGNORED = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


class CodeSize(Benchmark):
    """Lines, files, names and call walks of checkouts, given as ``--set now=. --set before=FOLDER``.

    A line of code is neither docstring nor comment nor blank. A walk visits functions in the order of their first
    calls. A stay is an uninterrupted part of a walk in one file; every stay in a file after its first is a return.
    CPU seconds are medians of seven imports, torch and Flower included.
    """

    name = "code-size"
    takes = ("settings",)

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the checkouts by name."""
        if not request.settings:
            raise ScenarioError("name the checkouts to look at, as in --set now=.")
        return {name: (Path(folder).resolve(),) for name, folder in request.settings.items()}

    def run(self, checkout: Path) -> Row:
        """Measure one checkout."""
        row: Row = sizes(checkout)
        walks = json.loads(_run(checkout, [sys.executable, str(paths_taken.__file__)]))
        row |= {f"{act}: {what}": n for act, walk in walks.items() for what, n in walk.items()}
        for what, statement in _LOADED.items():
            command = [sys.executable, "-c", _LOAD.format(statement=statement)]
            found = [json.loads(_run(checkout, command)) for _ in range(_TURNS)]
            row |= {f"{what}: {key}": median_low(each[key] for each in found) for key in found[0]}
        return row

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table with one column for each checkout."""
        table = pd.DataFrame(
            {
                name: {what: _text(value) for what, value in row.items()}
                for name, row in rows.items()
            }
        )
        return {"checkouts": table}


def _text(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def sizes(checkout: Path) -> dict[str, int]:
    """Return lines of code, files and exported names of library and laboratory, and the number of test functions.

    Raises
    ------
    ElasticError
        If the folder does not contain the library.
    """
    if not (checkout / _PARTS["library"]).is_dir():
        raise ElasticError(f"{checkout} holds no folder fl_elastic: give the folder of a checkout")
    found: dict[str, int] = {}
    for part, folder in _PARTS.items():
        files = sorted((checkout / folder).rglob("*.py"))
        texts = [file.read_text("utf-8") for file in files]
        found[f"{part}: files"] = len(files)
        found[f"{part}: lines of code"] = sum(map(code_lines, texts))
        if part.endswith("tests"):
            found[f"{part}: functions"] = sum(text.count("\ndef test_") for text in texts)
        else:
            packages = [
                t for file, t in zip(files, texts, strict=True) if file.name == "__init__.py"
            ]
            found[f"{part}: exported names"] = sum(map(_exported, packages))
    return found


def code_lines(text: str) -> int:
    """Return the number of lines of a module that hold code: not docstrings, comments or blank lines.

    >>> code_lines('def f():  # a comment' + chr(10) + '    "What it does."' + chr(10) + '    return 1')
    2
    """
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = [
        range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in _IGNORED
    ]
    return len(set().union(*lines) - docstrings)


def _exported(text: str) -> int:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def _run(checkout: Path, command: list[str]) -> str:
    path = os.pathsep.join([str(checkout), str(checkout / "simulations")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as neutral:
        ended = subprocess.run(
            command, env=environment, cwd=neutral, capture_output=True, text=True, check=False
        )
    if ended.returncode != 0:
        raise ElasticError(f"{command[-1][:80]} failed: {ended.stderr.strip()[-300:]}")
    return ended.stdout


BENCHMARK = CodeSize()
