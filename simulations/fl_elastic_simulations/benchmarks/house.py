"""How large the library and the laboratory are, and how much of them a device loads and a reader reads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any

from fl_elastic.errors import ElasticError
from fl_elastic_simulations import engine
from fl_elastic_simulations.benchmarks.results import Results

__all__ = ["LOADED", "bench_house", "house_markdown", "loaded", "look_at", "sizes"]

_LOAD = """
import json, sys, time
{statements}
own = [m for m in sys.modules if m.split(".")[0] in ("fl_elastic", "fl_elastic_simulations")]
pages = int(open("/proc/self/statm").read().split()[1]) if sys.platform == "linux" else 0
print(json.dumps({{"modules": len(own), "cpu_seconds": time.process_time(), "resident_bytes": 4096 * pages}}))
"""
LOADED = {
    "client": ("import fl_elastic.flower.client",),
    "message": (
        "import fl_elastic_simulations.fleet.app, fl_elastic_simulations.fleet.node",
        "import fl_elastic.flower.fleet_app, fl_elastic.flower.fleet_node",
    ),
    "own_app": ("import fl_elastic.flower.node_app", "import fl_elastic.flower.app"),
}
"""What a client, a node of a scenario and one of anybody's app import for a message, now and in older checkouts."""
_TURNS = 7


def bench_house(results: Results, checkouts: Mapping[str, Path]) -> None:
    """Add a row for each checkout, by name; what they load is loaded in turns.

    Raises
    ------
    ElasticError
        If one holds no library, or something of it cannot be loaded.
    """
    for name, row in look_at(checkouts).items():
        results.add(name, row)


_LINES = {
    "files of the library": "{library_files}",
    "lines of the library": "{library_lines:,}",
    "its modules with one importer": "{library_one_importer}",
    "names that its packages export": "{library_public_names}",
    "files of the laboratory": "{laboratory_files}",
    "lines of the laboratory": "{laboratory_lines:,}",
    "modules of ours that a client loads": "{client_modules}",
    "CPU seconds, memory of that": "{client_cpu_seconds:.2f} s, {client_resident_megabytes:.0f} MB",
    "modules of ours for a message of a scenario's node": "{message_modules}",
    "CPU seconds, memory of that one": "{message_cpu_seconds:.2f} s, {message_resident_megabytes:.0f} MB",
    "modules of ours for a message of anybody's app": "{own_app_modules}",
    "files that a plan runs through": "{plan_files}",
    "files that a fit runs through": "{fit_files}",
    "files that a round runs through, client and server": "{round_files}",
    "of them, files that a reply runs through besides the fit": "{reply_files}",
    "wheel of the library": "{wheel_kilobytes:.0f} kB",
}


def house_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all rows, a column each."""
    lines = [f"| | {' | '.join(rows)} |", "| --- |" + " --- |" * len(rows)]
    for title, form in _LINES.items():
        cells = [
            form.format(
                **row,
                client_resident_megabytes=row["client_resident_bytes"] / 1e6,
                message_resident_megabytes=row["message_resident_bytes"] / 1e6,
                wheel_kilobytes=row["wheel_bytes"] / 1e3,
            )
            for row in rows.values()
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def look_at(checkouts: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return sizes of both buildings, what is loaded for a client and a message, and files that acts take."""
    found: dict[str, dict[str, Any]] = {
        name: {**sizes(checkout), **_taken(checkout), "wheel_bytes": _wheel_bytes(checkout)}
        for name, checkout in checkouts.items()
    }
    for what, choices in LOADED.items():
        for name, row in loaded(checkouts, choices).items():
            found[name] |= {f"{what}_{key}": value for key, value in row.items()}
    return found


def _taken(checkout: Path) -> dict[str, int]:
    script = Path(engine.__file__).with_name("paths_taken.py")
    taken = json.loads(_run(checkout, [sys.executable, str(script)]))
    return {f"{act}_files": count for act, count in taken.items()}


def sizes(checkout: Path) -> dict[str, int]:
    """Return files, lines, modules with one importer and exported names of both buildings.

    Raises
    ------
    ElasticError
        If the folder holds no library.
    """
    buildings = {
        "library": checkout / "fl_elastic",
        "laboratory": checkout / "simulations" / "fl_elastic_simulations",
    }
    if not buildings["library"].is_dir():
        raise ElasticError(f"{checkout} holds no folder fl_elastic: give the folder of a checkout")
    found: dict[str, int] = {}
    importers = _importers([place for place in buildings.values() if place.is_dir()])
    for building, place in buildings.items():
        files = sorted(place.rglob("*.py"))
        found |= {
            f"{building}_files": len(files),
            f"{building}_lines": sum(len(file.read_text().splitlines()) for file in files),
            f"{building}_one_importer": sum(
                len(importers[_module(file, place)]) == 1
                for file in files
                if file.name != "__init__.py"
            ),
            f"{building}_public_names": sum(
                len(_exported(file)) for file in files if file.name == "__init__.py"
            ),
        }
    return found


def _module(file: Path, place: Path) -> str:
    return ".".join(file.relative_to(place.parent).with_suffix("").parts)


def _importers(places: list[Path]) -> dict[str, set[str]]:
    """Return by whom each module is imported, by its own name or a name in it; packages do not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for place in places:
        for file in place.rglob("*.py"):
            for name in _imported(file):
                found[name].add(str(file))
    return found


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _exported(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def loaded(
    checkouts: Mapping[str, Path], choices: tuple[str, ...], turns: int = _TURNS
) -> dict[str, dict[str, Any]]:
    """Return what an import loads in a process of its own, by the name of each checkout; medians of a few turns.

    Each checkout makes the first of the imports that it can. In a turn each is loaded once, so that a machine that
    is slower for a while is slower for all of them.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    made = {name: choices for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            statements, row = _first_loaded(checkout, made[name])
            made[name] = (statements,)
            rows[name].append(row)
    return {
        name: {key: median_low(row[key] for row in own) for key in own[0]}
        for name, own in rows.items()
    }


def _first_loaded(checkout: Path, choices: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    for statements in choices:
        try:
            text = _run(checkout, [sys.executable, "-c", _LOAD.format(statements=statements)])
        except ElasticError:
            continue
        return statements, json.loads(text)
    raise ElasticError(f"{checkout}: none of {', '.join(choices)} can be done")


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


def _wheel_bytes(checkout: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        _run(
            checkout,
            [
                sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder,
                str(checkout.resolve()),
            ],
        )  # fmt: skip
        return next(Path(folder).glob("*.whl")).stat().st_size
