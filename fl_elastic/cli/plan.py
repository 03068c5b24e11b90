"""``fl-elastic plan``: what would be trained under a budget, and at what cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fl_elastic.cli.tables import print_table
from fl_elastic.errors import PlanError
from fl_elastic.named_models import check_model_name, shape_of

if TYPE_CHECKING:
    from torch import nn

    from fl_elastic.cli.planned import Planned


_CLASSES = 10
# Bytes that a device of the schedule may use for features.
_FEATURE_BYTES = 1 << 30


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A torchvision name, or module:callable.")],
    input_: Annotated[
        str, typer.Option("--input", help="Shape of one example, such as 3,128,128.")
    ] = "3,224,224",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 16,
    speedup: Annotated[
        float | None, typer.Option(help="Full step time over allowed step time, at least 1.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Bytes for activations, gradients and optimiser state.")
    ] = None,
    uplink: Annotated[
        float | None, typer.Option(help="Bytes of one partial update as fp32.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy: elastic, full, head, ...")] = "elastic",
    importance: Annotated[str, typer.Option(help="Score that the policy uses.")] = "elastic",
    classes: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of classes; by default 10 for a torchvision model, and the outputs of your own.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="File of the cost profile: read if it exists, else written.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random batch.")] = 0,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also show the costs of this many rounds with the fleet's cut at each place.",
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the examples in each of the rounds.")
    ] = 5,
    examples: Annotated[int, typer.Option(min=1, help="Examples of one pass.")] = 1000,
    compare: Annotated[
        bool, typer.Option("--all/--only", help="Show all policies at this budget: takes longer.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the plan beside full steps and correct it.")
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Show where a head may read in the model, and no plan.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --read: a data set of the laboratory, or module:callable that returns a loader."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Profile a model here, score its tensor groups on random data, and choose what to train."""
    from fl_elastic.budget import Budget

    if data is not None and not read:
        raise PlanError(f"data {data!r}: a plan is made on random data; use --data with --read")

    # Check what can be checked before importing torch, which takes seconds.
    budget, shape = Budget(speedup=speedup, memory=memory, uplink=uplink), shape_of(input_)
    check_model_name(model)
    import torch

    from fl_elastic.cli.cost_tables import costs_line, print_costs, print_schedule
    from fl_elastic.cli.planned import classes_of, planned
    from fl_elastic.named_models import build_model
    from fl_elastic.planning.run_schedule import RunLength, run_schedule
    from fl_elastic.training.lean_start import without_compiler

    without_compiler()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    network = build_model(model, shape, classes or _CLASSES, seed)
    class_count = classes or classes_of(network, shape, _CLASSES)
    if read:
        source = context.get_parameter_source("input_")
        wanted = None if source is None or source.name == "DEFAULT" else shape
        _read(model, network, shape, batch_size, class_count, data, wanted, as_json)
        return
    # Progress, shown only on a terminal: planning takes seconds to minutes.
    with Console(stderr=True).status(f"{model}: ...") as shown:
        found = planned(
            network, shape, batch_size, class_count, budget, policy, importance,
            profile=profile, seed=seed, measure=measure, compare=compare,
            tell=lambda what: shown.update(f"{model}: {what}"),
        )  # fmt: skip
    result = describe(found)
    if rounds is not None:
        length = RunLength(rounds, epochs, examples, _FEATURE_BYTES)
        schedule = run_schedule(found.costs, length)
        result["schedule"] = [asdict(row) for row in schedule]
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(model, result)
        if compare:
            print_costs(found.reports, chosen=policy, measured=found.measured)
        else:
            typer.echo(costs_line(found.reports[0]))
        if rounds is not None:
            print_schedule(schedule, length)


def _read(
    name: str,
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    classes: int,
    data: str | None,
    wanted: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    from fl_elastic.cli.plan_read import describe_places, print_places

    with Console(stderr=True).status(f"{name}: looking at places"):
        result = describe_places(model, shape, batch_size, classes, data, wanted)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        print_places(name, result)


def describe(found: Planned) -> dict[str, Any]:
    """Return the plan and the costs of all plans as JSON values; seconds are those of this machine."""
    from fl_elastic.cli.cost_tables import as_json_values

    request, measured, chosen = found.request, found.measured, found.plan
    profile = request.profile
    full = measured.full_step_seconds if measured else profile.full_step_seconds
    step = measured.step_seconds if measured else chosen.predicted_step_seconds
    return {
        "policy": chosen.policy,
        "full_step_seconds": full,
        "predicted_step_seconds": chosen.predicted_step_seconds,
        "measured_step_seconds": measured.step_seconds if measured else None,
        "requested_speedup": request.budget.speedup or 1.0,
        "achieved_speedup": full / step,
        "floor_speedup": profile.full_step_seconds / profile.floor_step_seconds,
        "step_fraction": chosen.step_fraction,
        "step_bytes": chosen.predicted_step_bytes,
        "uplink_bytes": request.uplink_bytes(chosen.modes),
        "groups": [
            {
                "name": group.name,
                "parameters": list(group.parameters),
                "update_seconds": float(profile.update_seconds[index]),
                "path_seconds": float(profile.path_seconds[index]),
                "importance": float(request.importance[index]),
                "selected": bool(chosen.mask[index]),
                "mode": str(chosen.modes[index]),
            }
            for index, group in enumerate(chosen.groups)
        ],
        "policies": [as_json_values(report) for report in found.reports],
    }  # fmt: skip


def _print(model: str, result: dict[str, Any]) -> None:
    table = Table(title=f"{model}: plan of policy {result['policy']}, loss side first")
    for column, justify in (("group", "left"), ("mode", "left"), ("update ms", "right"),
                            ("path ms", "right"), ("importance", "right")):  # fmt: skip
        # Fold long names: cut off, different ones could look alike.
        folds = "fold" if justify == "left" else "ellipsis"
        table.add_column(column, justify=justify, overflow=folds)  # type: ignore[arg-type]
    for group in result["groups"]:
        table.add_row(
            group["name"], group["mode"], f"{1e3 * group['update_seconds']:.2f}",
            f"{1e3 * group['path_seconds']:.2f}", f"{group['importance']:.3g}",
            style=None if group["selected"] else "dim",
        )  # fmt: skip
    console = Console()
    print_table(table, console)
    # The times from which the speed-up is computed.
    step, known = result["measured_step_seconds"], "measured"
    if step is None:
        step, known = result["predicted_step_seconds"], "predicted"
    console.print(
        f"full step {1e3 * result['full_step_seconds']:.1f} ms, planned {1e3 * step:.1f} ms ({known}); "
        f"speed-up requested {result['requested_speedup']:.2f}, achieved {result['achieved_speedup']:.2f}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if result["step_fraction"] < 1:
        console.print(
            f"below the floor: one step cannot be faster than {result['floor_speedup']:.2f} times; "
            f"{result['step_fraction']:.0%} of the steps will be taken",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
