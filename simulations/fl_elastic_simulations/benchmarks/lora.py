"""Compare ways to train adapters on unequal devices: text and image models, pretrained here, learn new tasks."""

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
"""Names of the rows of the models before they are adapted, by task."""
_IMAGES = "cifar10_jpegq75"
# Two of eight blocks. With the least memory, a step above the first fits, one above the second does not.
_CUT, _HALF = "block7", "block5"
_FULL: Table = {"policy": "full"}

METHODS: dict[str, Table] = {
    # FedIT (Zhang et al., ICASSP 2024): each of the two factors is averaged by itself.
    REFERENCE: _FULL | {"budgeted": False, "stragglers": "wait"},
    "dropping": _FULL | {"budgeted": False, "stragglers": "drop"},
    "fewer steps": _FULL | {"budgeted": True},
    "fewer steps, products": _FULL | {"budgeted": True, "rule": "products"},
    "ffa-lora": {"peer": "ffa_lora"},
    "flexlora-style": {"peer": "flex_lora"},
    "lisa-style": {"peer": "random_blocks"},
    # Depth by budget as in both papers, without unequal ranks and with unchanged activations.
    "depth by budget, legend-style": {"policy": "last_k"},
    "fixed cut": _FULL | {"budgeted": True, "cut": f"fixed:{_CUT}", "keep_features": False},
    "fixed cut, kept features": _FULL | {"budgeted": True, "cut": f"fixed:{_CUT}"},
    "cut at half, kept features": _FULL | {"budgeted": True, "cut": f"fixed:{_HALF}"},
    "fl_elastic": {"policy": "elastic"},
}
"""Methods by their name in the table; settings that are not given have the defaults of a scenario."""

_SOLVED: Table = {"round_zero": "closed_form"}
SOLVED: dict[str, Table] = {
    "solved head, fewer steps": METHODS["fewer steps"] | _SOLVED,
    "solved head, fixed cut, kept features": METHODS["fixed cut, kept features"] | _SOLVED,
    "solved head, cut at half, kept features": METHODS["cut at half, kept features"] | _SOLVED,
    "solved head, fl_elastic": METHODS["fl_elastic"] | _SOLVED,
}
"""Methods that begin with a head in closed form, for tasks whose head is new and linear."""

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
    # A step that trains the adapters of the last two blocks fits; one that trains all adapters does not.
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
"""Tasks by their name on the command line."""


class Adapters(Federation):
    """Accuracy, time and bytes of ways to train adapters of text and image models on unequal devices.

    The models are pretrained here once and kept in the user's cache; their accuracy is a row of the table.
    """

    name = "lora"
    tasks = LORA
    recipe = Recipe()

    def task(self, name: str) -> FederationTask:
        """Return the task of this name, with the weights that were pretrained here."""
        return replace(self.tasks[name], weights=str(pretrained_file(self.recipe, name)))

    def measure(
        self, results: Results, request: Request, workers: int, tell: Callable[[str], None]
    ) -> None:
        """Pretrain the models whose weights do not exist yet, then run every method."""
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
        """Return a table for each task, with the means of each method over the seeds."""
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
