"""Ways to train adapters on unequal devices: models of text and of images, pretrained here, learn other ones."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_elastic_simulations.benchmarks.cells import chosen_tasks
from fl_elastic_simulations.benchmarks.federation import bench_federation
from fl_elastic_simulations.benchmarks.federation_methods import CLOSED_FORM, REFERENCE
from fl_elastic_simulations.benchmarks.federation_summary import cells_of, sooner_than
from fl_elastic_simulations.benchmarks.federation_tasks import FederationTask
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.models.pretraining import (
    Recipe,
    of_documentation,
    of_images,
    pretrained_file,
    pretraining,
)
from fl_elastic_simulations.models.vision import HEAD, seeded_vision_model
from fl_elastic_simulations.report.formats import bytes_text

__all__ = [
    "BASE",
    "LORA",
    "METHODS",
    "SEEDS",
    "SOLVED",
    "bench_lora",
    "lora_filled",
    "lora_markdown",
]

Table = dict[str, Any]

SEEDS = (0, 1, 2)
"""With which every cell of the table is run."""
BASE = "base"
"""Row of the language model before it is adapted; that of images is called after its task as well."""
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
    "flora-style": {"peer": "flora"},
    "lisa-style": {"peer": "random_blocks"},
    "legend-style": {"peer": "legend"},
    "fedquad-style": {"peer": "fedquad"},
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


def bench_lora(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    methods: Iterable[str] = (),
    workers: int = 1,
    recipe: Recipe | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Run every method of every task with every seed, from weights pretrained here; finished cells are kept.

    The weights are made once and kept in the user's cache, outside of the table; how good they are is a row.

    Parameters
    ----------
    results : Results
        The table.
    data_root : path-like, optional
        Where the datasets are.
    tasks, seeds, methods, workers, tell
        As in `fl_elastic_simulations.benchmarks.federation.bench_federation`.
    recipe : Recipe, optional
        By which the model is pretrained.

    Raises
    ------
    ScenarioError
        If a task or method is unknown.
    """
    recipe, root = recipe or Recipe(), str(data_root_folder(data_root))
    lessons = {
        "plays": (BASE, of_documentation),
        "clothes": (
            f"{BASE} clothes", lambda: of_images(seeded_vision_model, _IMAGES, root, left=HEAD)
        ),
    }  # fmt: skip
    among = {}
    for name in chosen_tasks(tasks, LORA):
        row_name, learnt_from = lessons[name]
        weights = pretrained_file(recipe, name)
        if not weights.exists() or row_name not in results.rows:
            row = pretraining(recipe, learnt_from(), weights)
            results.add(row_name, row)
            tell(
                f"{row_name}: accuracy {row['accuracy']:.3f} on what it learnt from, {row['cpu_seconds']:.0f} s"
            )
        among[name] = replace(LORA[name], weights=str(weights))
    bench_federation(
        results, data_root,
        among=among, seeds=seeds, methods=methods, workers=workers, tell=tell,
    )  # fmt: skip


def lora_markdown(rows: Mapping[str, Mapping[str, Any]], task: str) -> list[str]:
    """Return the lines of a Markdown table of a task: means over the seeds of each method.

    Accuracy at the end, and how many points more than waiting with the same seeds; how many times sooner, and with
    how many times fewer bytes in both directions, a method reaches the accuracy of waiting; bytes of the whole run;
    and the share of the clients' rounds that were merged.

    >>> lora_markdown({}, "plays")
    ['No cell of this table is measured yet.']
    """
    reference = cells_of(rows, task).get(REFERENCE, {})
    lines = []
    for method in LORA[task].methods:
        cells = cells_of(rows, task).get(method, {})
        found = sooner_than(cells, reference)
        if found is None:
            continue
        seeds, reached, times, both = found
        some = "" if reached == seeds else f" in {reached} of {seeds}"
        sooner = f"{times:.1f}x{some} | {both:.1f}x" if reached else "never | never"
        against = statistics.fmean(
            cells[seed]["final_accuracy"] - reference[seed]["final_accuracy"]
            for seed in set(cells) & set(reference)
        )
        more = f"{100 * against:+.1f}"
        if method == REFERENCE:
            sooner, more = " | ", ""
        merged, asked = (
            sum(cell["accepted"] + share * cell["rejected"] for cell in cells.values())
            for share in (0, 1)
        )
        accuracy, sent, received = (
            statistics.fmean(cell[name] for cell in cells.values())
            for name in ("final_accuracy", "uplink_bytes", "downlink_bytes")
        )
        lines.append(
            f"| {method} | {seeds} | {100 * accuracy:.1f} | {more} | {sooner} | {bytes_text(sent)} "
            f"| {bytes_text(received)} | {100 * merged / asked:.0f} % |"
        )
    if not lines:
        return ["No cell of this table is measured yet."]
    return [
        "| method | seeds | accuracy in % | more than waiting | sooner | fewer bytes | sent | received | merged |",
        "| --- |" + " --- |" * 8,
        *lines,
    ]


def lora_filled(text: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Return a document with the table of each task between its marks.

    >>> lora_filled("<!-- lora plays -->\nold\n<!-- end -->", {}).splitlines()[1]
    'No cell of this table is measured yet.'
    """

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *lora_markdown(rows, found[2]), found[3]])

    marked = rf"(<!-- lora ({'|'.join(LORA)}) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)
