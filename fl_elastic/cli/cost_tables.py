"""Costs of the plans of all policies, side by side: as tables and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fl_elastic.cli.planned import RefusedPolicy
from fl_elastic.cli.tables import print_table
from fl_elastic.planning.cost_report import CostReport
from fl_elastic.planning.run_schedule import RunAtCut, RunLength
from fl_elastic.training.measured import MeasuredPlan

# A row is only printed if its run takes longer than that of the previously printed row by this factor.
_WORTH_A_ROW = 1.15


def as_json_values(report: CostReport | RefusedPolicy) -> dict[str, Any]:
    """Return one policy's costs, or the reason why it refused the budget."""
    if isinstance(report, RefusedPolicy):
        return {"policy": report.policy, "refused": report.reason}
    return asdict(report)


def costs_line(report: CostReport | RefusedPolicy) -> str:
    """Return one sentence on the bytes that a plan's step keeps and sends, or the reason why there is no plan."""
    if isinstance(report, RefusedPolicy):
        return f"{report.policy} refuses: {report.reason}"
    return (
        f"a step keeps {short(report.backward_bytes)} bytes for the backward pass, which takes "
        f"{short(report.backward_macs)} multiply-adds; its peak is {short(report.peak_bytes)} bytes, and "
        f"{short(report.uplink_bytes)} bytes are sent"
    )


def print_costs(
    reports: Sequence[CostReport | RefusedPolicy],
    *,
    chosen: str,
    measured: MeasuredPlan | None = None,
) -> None:
    """Print the costs of a step of every plan, the bytes that it keeps, and the policies that refused.

    Times are predictions of the cost profile, except those of the measured plan.
    """
    steps = _table(
        f"costs of a step, predicted{f'; {chosen}: measured' if measured else ''}",
        ("groups", "depth", "ms", "speed-up", "steps", "MACs", "sent"),
    )
    kept = _table(
        "bytes that a step keeps",
        ("saved", "least", "backward", "peak"),
    )
    for report in reports:
        if isinstance(report, CostReport):
            style = "bold" if report.policy == chosen else None
            own = measured if report.policy == chosen else None
            steps.add_row(report.policy, *_taken(report, own), style=style)
            kept.add_row(report.policy, *_kept(report), style=style)
    console = Console()
    print_table(steps, console)
    print_table(kept, console)
    for report in reports:
        if isinstance(report, RefusedPolicy):
            console.print(f"{report.policy} refuses: {report.reason}", highlight=False)


def print_schedule(schedule: Sequence[RunAtCut], length: RunLength) -> None:
    """Print the costs of a run with the fleet's cut at each place, and without a cut."""
    table = _table(
        f"{length.rounds} rounds of {length.epochs} epochs over {length.examples} examples, by the deepest "
        "group that any client trains",
        ("weights", "step\nneeds", "features", "first\npass s", "step\nms", "run s", "times\nsooner",
         "pays after\nround"),
        first="group",
    )  # fmt: skip
    everything, shown = schedule[-1], 0.0
    for row in schedule:
        last = row is everything
        if row.seconds < _WORTH_A_ROW * shown and not last:
            continue
        shown = row.seconds
        table.add_row(
            row.deepest_group,
            f"{row.trained_share:.0%}",
            short(row.step_bytes),
            short(row.feature_bytes),
            f"{row.first_pass_seconds:.1f}",
            f"{1e3 * row.step_seconds:.1f}",
            f"{row.seconds:.0f}",
            f"{everything.seconds / row.seconds:.1f}",
            "-" if row.pays_after is None or last else str(row.pays_after),
        )
    console = Console()
    print_table(table, console)
    console.print(
        "Moving the cut costs the first pass of the row it moves to; each first pass is paid once by each device.",
        highlight=False,
    )


def _taken(report: CostReport, measured: MeasuredPlan | None = None) -> tuple[str, ...]:
    seconds = measured.step_seconds if measured else report.predicted_step_seconds
    return (
        str(report.groups),
        str(report.depth),
        f"{1e3 * seconds:.1f}",
        f"{measured.speedup if measured else report.predicted_speedup:.2f}",
        f"{report.step_fraction:.0%}",
        short(report.backward_macs),
        short(report.uplink_bytes),
    )


def _kept(report: CostReport) -> tuple[str, ...]:
    return tuple(
        short(number)
        for number in (
            report.activation_bytes,
            report.least_activation_bytes,
            report.backward_bytes,
            report.peak_bytes,
        )
    )


def short(number: float) -> str:
    """Return a number with three digits and the unit k, M or G.

    Examples
    --------
    >>> [short(number) for number in (12, 49_800, 999_900, 2_500_000)]
    ['12', '49.8k', '1M', '2.5M']
    """
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def _table(title: str, columns: Sequence[str], first: str = "policy") -> Table:
    table = Table(
        title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    # Fold long names: if cut off, different ones could look the same.
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
