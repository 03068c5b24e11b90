"""Ways to train adapters on unequal devices: models of text and of images, pretrained here, learn other ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import (
    Request,
    Results,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.benchmarks.federation import Cells, Federation, cells_of, sooner
from fl_elastic_simulations.benchmarks.federation_methods import CLOSED_FORM, REFERENCE
from fl_elastic_simulations.benchmarks.federation_tasks import FederationTask
from fl_elastic_simulations.models.pretraining import (
    Lessons,
    Recipe,
    of_documentation,
    of_images,
    pretrained_file,
    pretraining,
)
from fl_elastic_simulations.models.vision import HEAD, seeded_vision_model
from fl_elastic_simulations.report.formats import bytes_text

__all__ = ["BASE", "BENCHMARK", "LORA", "METHODS", "SOLVED", "Adapters"]

Table = dict[str, Any]

BASE = {"plays": "base", "clothes": "base clothes"}
"""Rows of the models before they are adapted, by task."""
_IMAGES = "cifar10_jpegq75"
# Of eight blocks; the devices with the least memory hold a step above the first of these, not of the second.
_CUT, _HALF = "block7", "block5"
_FULL: Table = {"policy": "full"}

METHODS: dict[str, Table] = {
    # FedIT (Zhang et al., ICASSP 2024): both factors are averaged one by one.
    REFERENCE: _FULL | {"budgeted": False, "stragglers": "wait"},
    "dropping": _FULL | {"budgeted": False, "stragglers": "drop"},
    "fewer steps": _FULL | {"budgeted": True},
    "fewer steps, products": _FULL | {"budgeted": True, "rule": "products"},
    "ffa-lora": {"peer": "ffa_lora"},
    "flexlora-style": {"peer": "flex_lora"},
    "lisa-style": {"peer": "random_blocks"},
    # The depth of both, without unequal ranks and with activations as they are.
    "depth by budget, legend-style": {"policy": "last_k"},
    "fixed cut": _FULL | {"budgeted": True, "cut": f"fixed:{_CUT}", "keep_features": False},
    "fixed cut, kept features": _FULL | {"budgeted": True, "cut": f"fixed:{_CUT}"},
    "cut at half, kept features": _FULL | {"budgeted": True, "cut": f"fixed:{_HALF}"},
    "fl_elastic": {"policy": "elastic"},
}
"""By the name in the table; what is not said has the defaults of a scenario."""

_SOLVED: Table = {"round_zero": "closed_form"}
SOLVED: dict[str, Table] = {
    "solved head, fewer steps": METHODS["fewer steps"] | _SOLVED,
    "solved head, fixed cut, kept features": METHODS["fixed cut, kept features"] | _SOLVED,
    "solved head, cut at half, kept features": METHODS["cut at half, kept features"] | _SOLVED,
    "solved head, fl_elastic": METHODS["fl_elastic"] | _SOLVED,
}
"""Those that begin with a head in closed form, where the task's head is new and linear."""

_PLAYS = FederationTask(
    title="Adapters of a language model, from documentation to plays",
    data={
        "dataset": "plays", "partition": "natural", "min_examples": 64,
        "train_limit": 1200, "test_limit": 128,
    },
    model="fl_elastic_simulations.models.language:adapted_language_model",
    speeds=((1.0, 2), (2.0, 1), (4.0, 1), (16.0, 2)),
    training={"local_steps": 8, "batch_size": 8, "optimizer": "adamw", "learning_rate": 0.003},
    reference_rounds=3,
    methods=METHODS,
    # Holds a step that trains the adapters of the last two blocks, not one that trains all of them.
    memory_bytes={16.0: 32 << 20},
)  # fmt: skip

LORA: dict[str, FederationTask] = {
    "plays": _PLAYS,
    "clothes": replace(
        _PLAYS,
        title="Adapters of a vision transformer, from things to clothes",
        data={
            "dataset": "fashion_mnist", "image_size": 32, "partition": "dirichlet", "alpha": 0.3,
            "min_examples": 64, "train_limit": 3000, "test_limit": 500,
        },
        model="fl_elastic_simulations.models.vision:adapted_vision_model",
        methods=METHODS | SOLVED | CLOSED_FORM,
    ),
}  # fmt: skip
"""By the name on the command line."""


class Adapters(Federation):
    """Accuracy, time and bytes of ways to train adapters of models of text and images on unequal devices.

    The models are pretrained here once and kept in the user's cache; how good they are is a row.
    """

    name = "lora"
    tasks = LORA
    recipe = Recipe()

    def task(self, name: str) -> FederationTask:
        """Return a task with the weights that were made here."""
        return replace(self.tasks[name], weights=str(pretrained_file(self.recipe, name)))

    def measure(
        self, results: Results, request: Request, workers: int, tell: Callable[[str], None]
    ) -> None:
        """Pretrain models whose weights are not there, then run every method."""
        lessons: dict[str, Callable[[], Lessons]] = {
            "plays": of_documentation,
            "clothes": lambda: of_images(
                seeded_vision_model, _IMAGES, request.data_root, left=HEAD
            ),
        }
        for name in chosen_tasks(request.tasks, self.tasks):
            weights = pretrained_file(self.recipe, name)
            if not weights.exists() or BASE[name] not in results.rows:
                results.add(BASE[name], pretraining(self.recipe, lessons[name](), weights))
                tell(BASE[name])
        super().measure(results, request, workers, tell)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table of means over the seeds of each method for each task."""
        found = {}
        for name, task in self.tasks.items():
            reference = cells_of(rows, name, REFERENCE)
            lines = {
                method: _line(own, reference, waiting=method == REFERENCE)
                for method in task.methods
                if (own := cells_of(rows, name, method)) and set(own) & set(reference)
            }
            found[name] = pd.DataFrame.from_dict(lines, orient="index").rename_axis("method")
        return found


def _line(own: Cells, reference: Cells, *, waiting: bool) -> dict[str, str]:
    """Return the columns of a method, with differences and ratios to waiting with the same seeds."""
    seeds = sorted(set(own) & set(reference))
    sums = pd.DataFrame(list(own.values()))
    merged = sums["accepted"].sum() / (sums["accepted"] + sums["rejected"]).sum()
    against = statistics.fmean(
        own[seed]["final_accuracy"] - reference[seed]["final_accuracy"] for seed in seeds
    )
    times, both = _ratios(own, reference, seeds)
    return {
        "seeds": str(len(seeds)),
        "accuracy in %": f"{100 * sums['final_accuracy'].mean():.1f}",
        "more than waiting": "" if waiting else f"{100 * against:+.1f}",
        "sooner": "" if waiting else times,
        "fewer bytes": "" if waiting else both,
        "sent": bytes_text(sums["uplink_bytes"].mean()),
        "received": bytes_text(sums["downlink_bytes"].mean()),
        "merged": f"{100 * merged:.0f} %",
    }


def _ratios(own: Cells, reference: Cells, seeds: list[int]) -> tuple[str, str]:
    found = [each for seed in seeds if (each := sooner(own[seed], reference[seed]))]
    if not found:
        return "never", "never"
    some = "" if len(found) == len(seeds) else f" in {len(found)} of {len(seeds)}"
    times, _, both = (statistics.fmean(each) for each in zip(*found, strict=True))
    return f"{times:.1f}x{some}", f"{both:.1f}x"


BENCHMARK = Adapters()
