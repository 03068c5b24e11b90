"""Whether filtered gradients pay: in single layers, in whole steps, by what they keep, and in a planner's eyes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.planning import Plan
from fl_elastic.planning.importance.fidelity import Fidelity, measure_fidelity
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.modes import convolution_module
from fl_elastic_simulations.benchmarks.filter_layers import (
    FILTERED,
    KINDS,
    backward_ratios,
    kind_of,
    layers_of,
    median_by_kind,
)
from fl_elastic_simulations.benchmarks.memory import mode_counts
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.steps import interleaved_seconds
from fl_elastic_simulations.benchmarks.subject import Subject, pretrained_subject, subject

__all__ = [
    "bench_filter",
    "choice_row",
    "cosine_rows",
    "layer_rows",
    "step_row",
    "value_per_second",
    "with_modes",
]

MODELS = ("resnet18", "mobilenet_v2")
PIXELS = (32, 64, 128)
SPEEDUPS = (2.0, 3.0)
_BATCH, _LAST = 16, 4
_REACHES = {"last 4 convolutions": _LAST, "all convolutions": None}


def bench_filter(results: Results, data_root: str | Path | None = None) -> None:
    """Measure every row that is missing; batch 16, channels last, CPU time of one thread.

    MobileNetV2 has ImageNet weights and sees birds where these files are at hand (the row says so), everything
    else random weights and random images.
    """
    torch.set_num_threads(1)
    for model in MODELS:
        for pixels in PIXELS:
            case = f"{model} at {pixels}"
            if not _has(results, f"layers | {case} | "):
                for kind, row in layer_rows(model, pixels).items():
                    results.add(f"layers | {case} | {kind}", row)
            missing = [
                part
                for part in ("step", "cosine", "choice")
                if not _has(results, f"{part} | {case} | ")
            ]
            if missing:
                _add_planned(results, missing, case, *_subject(model, pixels, data_root))


def _add_planned(
    results: Results, missing: Sequence[str], case: str, of: Subject, data: str
) -> None:
    fidelity = measure_fidelity(of.model, classification_loss, of.batches[-1], of.graph, FILTERED)
    rows: dict[str, Mapping[str, Any]] = {}
    if "step" in missing:
        for reach, count in _REACHES.items():
            rows[f"step | {case} | {reach}"] = step_row(of, count)
    if "cosine" in missing:
        for kind, row in cosine_rows(of, fidelity).items():
            rows[f"cosine | {case} | {kind}"] = row
    if "choice" in missing:
        for speedup in SPEEDUPS:
            rows[f"choice | {case} | {speedup:g}"] = choice_row(of, fidelity, speedup)
    for name, found in rows.items():
        results.add(name, {"data": data, **found})


def _has(results: Results, start: str) -> bool:
    return any(name.startswith(start) for name in results.rows)


def layer_rows(model: str, pixels: int, *, repeats: int = 9) -> dict[str, dict[str, float]]:
    """Return, per kind of layer, the time of filtered gradients over exact ones; see `median_by_kind`."""
    torch.manual_seed(0)
    network = resolve_model(model, 10)
    layers = layers_of(network, (_BATCH, 3, pixels, pixels))
    return median_by_kind(layers, backward_ratios(layers, clock_for("cpu", "cpu"), repeats=repeats))


def step_row(of: Subject, count: int | None, *, repeats: int = 5) -> dict[str, Any]:
    """Return the time of steps that filter the gradients of the last ``count`` convolutions (None for all).

    The head trains too, norms are frozen. Beside them the same convolutions with exact gradients, and a step that
    trains everything. Runs of filtered convolutions are joined where they follow one another.
    """
    full = of.plan("full", Budget())
    groups = _convolutions(of, count)
    plans = [with_modes(full, groups, of, mode) for mode in (Mode.FULL, *FILTERED)]
    seconds = interleaved_seconds(
        of.model, [full, *plans], of.graph, of.batches[0], repeats=repeats
    )
    exact = seconds[1]
    return {
        "convolutions": len(groups),
        "filtered": sum(mode.kind == "filtered" for mode in plans[1].modes),
        "exact_over_full": exact / seconds[0],
        **{
            f"{mode}_over_exact": taken / exact
            for mode, taken in zip(FILTERED, seconds[2:], strict=True)
        },
        **{
            f"{mode}_over_full": taken / seconds[0]
            for mode, taken in zip(FILTERED, seconds[2:], strict=True)
        },
    }


def with_modes(full: Plan, groups: Sequence[int], of: Subject, mode: Mode) -> Plan:
    """Return the plan that trains the head whole and ``groups`` in ``mode``, whole where there is no patch."""
    modes = [Mode.FROZEN] * len(full.modes)
    modes[of.graph.head] = Mode.FULL
    for group in groups:
        modes[group] = mode if mode == Mode.FULL or _filters(of, group) else Mode.FULL
    return replace(full, modes=tuple(modes))


def cosine_rows(of: Subject, fidelity: Fidelity) -> dict[str, dict[str, float]]:
    """Return, per kind of layer, the median cosine between filtered and exact gradients of weight and input."""
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        groups = [g for g in _convolutions(of, None) if _kind(of, g) == kind and _filters(of, g)]
        if groups:
            row: dict[str, float] = {"layers": len(groups)}
            for column, mode in enumerate(fidelity.modes):
                row[f"weight_{mode}"] = _median(fidelity.weights[groups, column])
                if mode.filters_input:
                    row[f"input_{mode}"] = _median(fidelity.inputs[groups, column])
            table[kind] = row
    return table


def choice_row(of: Subject, fidelity: Fidelity, speedup: float) -> dict[str, Any]:
    """Return what the joint policy chooses at a speed-up, and what each filtered mode is worth per second.

    A mode keeps the square of its cosine of a layer's importance, and takes its measured share of the time. Where
    the quotient is below 1, a second spent on whole gradients of other layers is worth more.
    """
    plan = of.plan("joint", Budget(speedup=speedup))
    assert of.profile.modes is not None
    groups = [group for group in _convolutions(of, None) if _filters(of, group)]
    row: dict[str, Any] = {
        "chosen": mode_counts(plan.modes),
        "filtered": sum(mode.kind == "filtered" for mode in plan.modes),
        "predicted_speedup": plan.predicted_speedup,
        "layers": len(groups),
    }
    for column, mode in enumerate(fidelity.modes):
        costs = of.profile.modes.column(mode)
        assert costs is not None
        ratio = of.profile.modes.update_ratio[groups, costs]
        worth = value_per_second(fidelity.weights[groups, column], ratio)
        row[f"time_{mode}"] = _median(ratio)
        row[f"kept_{mode}"] = _median(fidelity.weights[groups, column].clip(0, 1) ** 2)
        row[f"value_per_second_{mode}"] = _median(worth)
        row[f"layers_above_1_{mode}"] = int((worth > 1).sum())
        if mode.filters_input:
            row[f"path_time_{mode}"] = _median(of.profile.modes.path_ratio[groups, costs])
            row[f"path_kept_{mode}"] = _median(fidelity.inputs[groups, column].clip(0, 1) ** 2)
    return row


def value_per_second(
    cosines: NDArray[np.float64], ratios: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the square of each cosine over the time that it takes, both relative to whole gradients.

    Examples
    --------
    >>> value_per_second(np.array([1.0, 0.5, -0.5]), np.array([0.5, 0.5, 0.5])).tolist()
    [2.0, 0.5, 0.0]
    """
    worth: NDArray[np.float64] = cosines.clip(0, 1) ** 2 / ratios
    return worth


def _subject(model: str, pixels: int, root: str | Path | None) -> tuple[Subject, str]:
    pretrained = pretrained_subject(pixels, _BATCH, root) if model == "mobilenet_v2" else None
    if pretrained is not None:
        return pretrained, "birds, pretrained"
    return subject(model, pixels, _BATCH), "random"


def _convolutions(of: Subject, count: int | None) -> list[int]:
    """Return the groups of the last ``count`` convolutions but shortcuts (kernel 1 with a stride); all for None."""
    found = []
    for group in range(len(of.graph.groups)):
        conv = convolution_module(of.graph, of.model, group)
        if conv is not None and not (max(conv.stride) > 1 and conv.kernel_size == (1, 1)):
            found.append(group)
    return found[:count]


def _filters(of: Subject, group: int) -> bool:
    """Whether the input of a convolution has more than one pixel each way."""
    node = of.graph.nodes[of.graph.group_nodes()[group][-1]]
    given = of.graph.nodes[node.inputs[0]].shape if node.inputs else of.profile.key.batch_shape
    return len(given) == 4 and min(given[2:]) > 1


def _kind(of: Subject, group: int) -> str:
    conv = convolution_module(of.graph, of.model, group)
    return "other" if conv is None else kind_of(conv)


def _median(values: NDArray[np.float64]) -> float:
    known = [float(value) for value in values if np.isfinite(value)]
    return statistics.median(known) if known else float("nan")
