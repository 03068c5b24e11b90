"""Run independent cells of a table in processes of their own, so that stopping one stops them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import as_completed
from typing import Any

from fl_elastic.errors import ScenarioError
from fl_elastic.registry import closest
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.worker_processes import worker_processes

__all__ = ["Row", "add_missing", "chosen_tasks", "finished_cells"]

Row = dict[str, Any]


def chosen_tasks(names: Iterable[str], known: Iterable[str], *, what: str = "task") -> list[str]:
    """Return the tasks, or methods, to run: those named, or else all.

    Raises
    ------
    ScenarioError
        If one is unknown.
    """
    every = list(known)
    chosen = list(names) or every
    for name in chosen:
        if name not in every:
            raise ScenarioError(
                f"unknown {what} {name!r}{closest(name, every)}: known are {', '.join(every)}"
            )
    return chosen


def add_missing(
    results: Results,
    run: Callable[..., Row],
    cells: Mapping[str, tuple[Any, ...]],
    workers: int,
    tell: Callable[[str], object],
    said: Callable[[Row], str],
) -> None:
    """Add the rows of all cells that a table does not have, each as it is finished.

    Parameters
    ----------
    results : Results
        The table.
    run, cells, workers
        As in `finished_cells`.
    tell : callable
        Hears of each finished cell.
    said : callable
        ``said(row)`` is what it hears besides the cell's name.
    """
    missing = {name: cell for name, cell in cells.items() if name not in results.rows}
    for done, (name, row) in enumerate(finished_cells(run, missing, workers), start=1):
        results.add(name, row)
        tell(f"{done}/{len(missing)} {name}: {said(row)}")


def finished_cells(
    run: Callable[..., Row], cells: Mapping[str, tuple[Any, ...]], workers: int
) -> Iterator[tuple[str, Row]]:
    """Yield name and row of each cell as it is finished.

    Whatever ends the iteration early, Ctrl-C included, ends the cells at work as well; cells end too when this
    process is killed.

    Parameters
    ----------
    run : callable
        ``run(*arguments)`` returns a cell's row; importable, as it is called in other processes.
    cells : mapping of str to tuple
        Arguments by name.
    workers : int
        Cells at a time.
    """
    if not cells:
        return
    with worker_processes(workers) as pool:
        running = {pool.submit(run, *arguments): name for name, arguments in cells.items()}
        for future in as_completed(running):
            yield running[future], future.result()
