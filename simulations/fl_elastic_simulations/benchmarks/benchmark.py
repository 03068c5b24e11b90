"""The base class of benchmarks: cases, how they are run, and the tables that are made of their rows."""

from __future__ import annotations

import fcntl
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pandas as pd

from fl_elastic.environment import environment
from fl_elastic.errors import ScenarioError
from fl_elastic.registry import closest
from fl_elastic.state.files import write_atomically
from fl_elastic_simulations.engine.worker_processes import worker_processes

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Mapping[str, Mapping[str, Any]]

# A list that holds only numbers. A string in JSON cannot contain a line break, so none is matched.
_NUMBERS = re.compile(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]')


_OPTIONS = {"tasks": "--task", "methods": "--method", "seeds": "--seed", "settings": "--set"}


@dataclass(frozen=True)
class Request:
    """Which cases to run, and the folders of files.

    Attributes
    ----------
    folder : Path
        Folder of the benchmark's own files, beside its table.
    data_root : str
        Folder of the datasets.
    tasks, methods : sequence of str
        Names to run; all if empty.
    seeds : sequence of int
        Seeds to run; the benchmark's own seeds if empty.
    settings : mapping of str to str
        Further settings by name, for benchmarks that take some.
    """

    folder: Path
    data_root: str = ""
    tasks: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


class Benchmark(ABC):
    """One question, answered by rows that are measured case by case.

    Cases run in processes of their own. Rows are stored after each case, so that an interrupted run can resume.

    Attributes
    ----------
    name : str
        Name of the command, and of its marks in documents.
    file : str
        Name of the file of rows, without its suffix; derived from ``name`` if empty.
    seeds : tuple of int
        Seeds of the cases; empty for a benchmark without seeds.
    fresh_process : bool
        Whether each case gets a new process, as measurements of peak memory need it.
    takes : tuple of str
        Attributes of `Request` that choose among the cases; a request with any other one is refused.
    """

    name: ClassVar[str]
    file: ClassVar[str] = ""
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)
    fresh_process: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the arguments of `run` for each case, by the name of its row.

        It is called again, with the rows, when all these cases are measured: later cases may depend on earlier
        rows.
        """

    @abstractmethod
    def run(self, *case: Any) -> Row:
        """Measure one case in this process, and return its row."""

    @abstractmethod
    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return the tables of these rows, by name. Cells are text; ``attrs["notes"]`` are lines below a table."""

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return the text to print about a row when it is measured."""
        del row
        return ""

    def measure(
        self, results: Results, request: Request, workers: int, tell: Callable[[str], None]
    ) -> None:
        """Measure all cases whose rows are not in the table yet.

        Raises
        ------
        ScenarioError
            If the request chooses by something that this benchmark does not have.
        """
        for each, option in _OPTIONS.items():
            if getattr(request, each) and each not in self.takes:
                raise ScenarioError(
                    f"bench {self.name} has no {each} to choose from: leave out {option}"
                )
        while cases := _missing(self.cases(request, results.rows), results):
            add_missing(
                results, self.run, cases, workers, tell, self.summary, fresh=self.fresh_process
            )


class Results:
    """Rows of a benchmark by name, written to a file after each one.

    Several processes may fill one table: when a process adds a row, it first reads the rows that others have added.

    Parameters
    ----------
    path : Path
        The JSON file.
    fresh : bool
        Whether to measure the rows of an earlier run again.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.rows: dict[str, Row] = {} if fresh else self._stored()
        self._fresh = fresh

    def add(self, name: str, row: Row) -> None:
        """Add one row, and write the table with the machine, versions and date."""
        with self._alone():
            self.rows = self.rows if self._fresh else self._stored() | self.rows
            self._fresh = False
            self.rows[name] = row
            document = {"environment": environment(), "rows": self.rows}
            text = _NUMBERS.sub(_in_one_line, json.dumps(document, indent=1))
            write_atomically(self.path, f"{text}\n".encode())

    def _stored(self) -> dict[str, Row]:
        try:
            return dict(json.loads(self.path.read_text())["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from adding a row inside the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is on the folder, since each new row replaces the file of the table.
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def chosen_tasks(names: Iterable[str], known: Iterable[str], *, what: str = "task") -> list[str]:
    """Return the names that were asked for, by default all known names.

    Raises
    ------
    ScenarioError
        If a name is unknown.
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
    tell: Callable[[str], None],
    said: Callable[[Row], str],
    *,
    fresh: bool = False,
) -> None:
    """Measure the cases that a table lacks, in processes of their own, and add each row when it is finished.

    If the call ends early, by Ctrl-C for example, the running cases end too. They also end if this process is
    killed.

    Parameters
    ----------
    results : Results
        The table.
    run : callable
        ``run(*arguments)`` returns a row. It must be importable, since other processes call it.
    cells : mapping of str to tuple
        Arguments of ``run`` by the name of the row.
    workers : int
        Number of cases that run at the same time.
    tell, said : callable
        ``tell`` gets a line of text for each row; the line ends in ``said(row)``.
    fresh : bool
        Whether each case runs in a process of its own.
    """
    missing = _missing(cells, results)
    if not missing:
        return
    with worker_processes(workers, tasks_each=1 if fresh else None) as pool:
        running = {pool.submit(run, *arguments): name for name, arguments in missing.items()}
        for done, future in enumerate(as_completed(running), start=1):
            name, row = running[future], future.result()
            results.add(name, row)
            tell(f"{done}/{len(missing)} {name}: {said(row)}".rstrip(": "))


def _missing(cells: Mapping[str, tuple[Any, ...]], results: Results) -> dict[str, tuple[Any, ...]]:
    return {name: cell for name, cell in cells.items() if name not in results.rows}


def _in_one_line(numbers: re.Match[str]) -> str:
    """Return a list of numbers on one line, since a curve has hundreds of numbers."""
    return f"[{', '.join(part.strip() for part in numbers[1].split(','))}]"


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown, with the index in the first column and the notes below.

    >>> print(markdown(pd.DataFrame({"accuracy": {"full": "90.1"}}).rename_axis("method")))
    | method | accuracy |
    | --- | --- |
    | full | 90.1 |
    """
    if table.empty:
        return "No row of this table is measured yet."
    table = table.fillna("").reset_index(names=table.index.name or "")
    head = f"| {' | '.join(table.columns)} |".replace("|  |", "| |")
    lines = [f"| {' | '.join(cells)} |" for cells in table.itertuples(index=False)]
    text = "\n".join([head, f"|{' --- |' * len(table.columns)}", *lines])
    notes = table.attrs.get("notes", ())
    return "\n".join([text, "", *notes]) if notes else text


def fill(text: str, benchmark: Benchmark, rows: Rows) -> str:
    r"""Return a document with the tables of a benchmark inserted between their marks.

    The table ``birds`` of the benchmark ``read`` goes between ``<!-- read birds -->`` and ``<!-- end -->``.

    Raises
    ------
    ScenarioError
        If the benchmark has no such table, or a mark has no end before the next one.
    """
    tables = benchmark.tables(rows)

    def table(found: re.Match[str]) -> str:
        if found[2] not in tables:
            known = ", ".join(tables)
            raise ScenarioError(f"no table {found[2]!r} of {benchmark.name}: known are {known}")
        return "\n".join([found[1], markdown(tables[found[2]]), found[3]])

    began = rf"(<!-- {benchmark.name} (\S+) -->)"
    # Up to the next mark of any kind: a mark without an end must not take the text up to another's.
    marked = re.compile(rf"{began}\n(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)
    for found in re.finditer(began, text):
        if not marked.match(text, found.start()):
            raise ScenarioError(f"{found[1]} has no <!-- end --> below it, before the next mark")
    return marked.sub(table, text)
