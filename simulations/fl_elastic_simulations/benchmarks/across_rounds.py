"""Compare, on pretrained models, methods that keep heads and features from round to round with plain ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import Rows
from fl_elastic_simulations.benchmarks.federation import Cells, Federation, cells_of, sooner
from fl_elastic_simulations.benchmarks.federation_methods import SAME_HEAD
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    LARGER,
    LONGER,
    PRETRAINED,
    methods_of,
)
from fl_elastic_simulations.benchmarks.intervals import mean_text


class AcrossRounds(Federation):
    """Accuracy, time and bytes of methods that keep heads and features between rounds, on pretrained models."""

    name = "across-rounds"
    tasks = PRETRAINED | CONVERGED | LONGER | LARGER
    columns = PRETRAINED

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return tables of accuracy, costs of choosing, last tests, larger images and converged runs."""
        return {
            **super().tables(rows),
            "ends": self.by_task(rows, self._end, SAME_HEAD),
            "larger": self.by_task(rows, self._end, SAME_HEAD, LARGER),
            "converged": _converged(rows),
        }

    def _end(self, own: Cells, rival: Cells) -> str:
        """Return the accuracy of the last test, with its difference to full steps under the same kind of head."""
        seeds = sorted(set(own) & set(rival))
        last, others = ([each[seed]["curve"][-1][-1] for seed in seeds] for each in (own, rival))
        more = [mine - other for mine, other in zip(last, others, strict=True)]
        against = f" ({mean_text(more, sign=True)})" if any(more) else ""
        return f"{mean_text(last)}{against}{self.of_seeds(len(seeds))}"


def _converged(rows: Rows) -> pd.DataFrame:
    """Return how much sooner each method reaches the final accuracy of a plain method that ran until it converged.

    A column stands for one converged plain method. A cell gives the ratio of the times and that of the bytes in
    both directions. A method's longer run is used if there is one.
    """
    columns = {}
    for name, task in CONVERGED.items():
        for plain in task.methods:
            reference = cells_of(rows, name, plain)
            if reference:
                final = statistics.fmean(row["final_accuracy"] for row in reference.values())
                cells = {
                    method: _sooner(_longest(rows, task.costs, method), reference)
                    for method in methods_of(PRETRAINED)
                }
                columns[f"{task.title}, {plain}: {100 * final:.1f} %"] = cells
    table = pd.DataFrame(columns).rename_axis("method")
    return table[(table != "").any(axis=1)]


def _longest(rows: Rows, task: str, method: str) -> Cells:
    """Return a method's rows of a task by seed, those of a longer run if there is one."""
    runs = [task, *(name for name, longer in LONGER.items() if longer.costs == task)]
    return {seed: row for run in runs for seed, row in cells_of(rows, run, method).items()}


def _sooner(own: Cells, reference: Cells) -> str:
    seeds = sorted(set(own) & set(reference))
    if not seeds:
        return ""
    fewer = "" if len(seeds) == len(reference) else f" [{len(seeds)} of {len(reference)} seeds]"
    found = [each for seed in seeds if (each := sooner(own[seed], reference[seed]))]
    if not found:
        return f"never{fewer}"
    some = "" if len(found) == len(seeds) else f" in {len(found)} of {len(seeds)}"
    times, _, both = (statistics.fmean(each) for each in zip(*found, strict=True))
    return f"{times:.1f}x, {both:.1f}x{some}{fewer}"


BENCHMARK = AcrossRounds()
