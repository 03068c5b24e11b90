"""``fl-elastic fleet submit`` and ``fleet up``: runs on a fleet."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_elastic.cli.tables import say
from fl_elastic.errors import FleetError
from fl_elastic.laboratory import from_laboratory

if TYPE_CHECKING:
    from fl_elastic.fleet.flower_cli import FlowerCommands, RunState
    from fl_elastic.fleet.inventory import Inventory


# The nodes are queried at every fifth query of the run.
_LOOKS_FOR_NODES = 5


def submit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the fleet.")],
    app: Annotated[
        Path | None,
        typer.Argument(metavar="APP_DIR", help="Flower app; by default the fleet's own."),
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Scenario file (TOML), for the fleet's own app.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Setting of the app, or of the scenario: seed=1, training.rounds=5."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint: --set resume=true.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a Flower app on the fleet, and wait until the run has ended; Ctrl-C stops the run.

    The fleet's own app trains a scenario and writes into server/results. Another app is given that folder, too,
    if it has an empty setting ``results``; ``fleet status`` reads rounds.jsonl there.
    """
    from fl_elastic.fleet.flower_cli import flower_at
    from fl_elastic.fleet.inventory import load_inventory
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.names import parse_settings
    from fl_elastic.fleet.submit import app_settings, wait_for_run
    from fl_elastic.fleet.submit import submit as submit_app

    place = FleetFolder(folder)
    inventory = load_inventory(place.inventory)
    flower = flower_at(place, inventory.server)
    # A dotted key belongs to the scenario, as in `fl-elastic simulate`; the app's keys have no dots.
    dotted = [text for text in setting or () if "." in text.partition("=")[0]]
    if dotted and (app is not None or scenario is None):
        raise FleetError(
            f"setting {dotted[0]!r} is one of a scenario: give the scenario with --scenario FILE"
        )
    own = [text for text in setting or () if text not in dotted]
    settings = {**parse_settings(own), **({"resume": True} if resume else {})}
    if app is None:
        settings = {"results": str(place.results.resolve()), **settings}
        if scenario is not None:
            settings["scenario"] = from_laboratory("scenario_text")(
                scenario, dotted, method=str(settings.get("method", ""))
            )
        if not settings.get("scenario"):
            raise FleetError("say what is trained: --scenario FILE, or the folder of a Flower app")
    elif scenario is not None:
        raise FleetError("--scenario is for the fleet's own app; give this one --set key=value")
    elif app_settings(app).get("results") == "":
        settings = {"results": str(place.results.resolve()), **settings}
    run_id = submit_app(flower, place.app if app is None else app, settings)
    if not wait:
        typer.echo(json.dumps({"run_id": run_id}) if as_json else run_id)
        return
    rounds = _Rounds(Path(str(settings.get("results", place.results))) / place.rounds.name)
    missing = _Missing(flower, inventory)
    say(f"run {run_id} submitted")

    def look() -> None:
        rounds.look()
        missing.look()

    state = wait_for_run(flower, run_id, say, on_look=look)
    if app is None and rounds.printed and not state.completed:
        say("go on from the last checkpoint with the same command and --resume")
    _finish(state, as_json, {})


def up(
    local: Annotated[int, typer.Option(min=1, help="Nodes on this machine.")],
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario file (TOML); by default handwritten digits.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value: training.rounds=5 (repeatable)."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Method of the scenario; by default the first elastic one.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of split, weights and batches.")] = 0,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of datasets; FL_ELASTIC_DATA_ROOT does the same.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for all files; by default they are deleted at the end."),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, help="Torch threads of a node; 0 shares the processors.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a whole fleet on this machine, with a real server and real nodes, and train a scenario on it."""
    from fl_elastic.fleet.up import run_local

    signal.signal(signal.SIGTERM, _as_interruption)
    try:
        state, result = run_local(
            local, scenario, override or (), method=method, seed=seed, data_root=data_root,
            keep=keep, threads=threads, tell=say,
            on_rounds=lambda path: _Rounds(path).look,
        )  # fmt: skip
    except KeyboardInterrupt:
        if keep is not None:
            raise
        say("interrupted; nothing is kept: --keep FOLDER would keep the results")
        raise typer.Exit(130) from None
    _finish(state, as_json, result)


class _Rounds:
    """Prints every round of a journal once."""

    def __init__(self, path: Path) -> None:
        from fl_elastic.monitoring.journal import Journal

        self._journal = Journal(path)
        self.printed = False
        # Rounds of an earlier run are not printed.
        self._known = {_identity(entry) for entry in self._journal.entries()}

    def look(self) -> None:
        for entry in self._journal.entries():
            if _identity(entry) not in self._known:
                self._known.add(_identity(entry))
                self.printed = True
                say(_line(entry))


class _Missing:
    """Prints which nodes are not online, whenever that changes."""

    def __init__(self, flower: FlowerCommands, inventory: Inventory) -> None:
        self._flower, self._inventory = flower, inventory
        self._before: list[str] = []
        self._looks = 0

    def look(self) -> None:
        from fl_elastic.fleet.flower_cli import ServerUnreachable
        from fl_elastic.fleet.status import fleet_status

        self._looks += 1
        # Each query starts a process of Flower's.
        if self._looks % _LOOKS_FOR_NODES != 1:
            return
        try:
            states = self._flower.nodes()
        except ServerUnreachable:
            return
        names = {node.name for node in self._inventory.nodes if not node.revoked}
        found = fleet_status(self._inventory, states, {})
        missing = sorted(n.name for n in found if n.name in names and n.state != "online")
        if missing != self._before:
            there = f"{len(names) - len(missing)} of {len(names)} nodes"
            which = f"; not online: {', '.join(missing)}"
            say(f"waiting: {there}{which}" if missing else f"{there} are online")
        self._before = missing


def _identity(entry: dict[str, Any]) -> str:
    return f"{entry.get('round')} {entry.get('time')}"


def _line(entry: dict[str, Any]) -> str:
    parts = [f"round {entry.get('round')}"]
    accuracy, seconds = entry.get("accuracy"), entry.get("round_seconds")
    if isinstance(accuracy, (int, float)):
        parts.append(f"accuracy {accuracy:.2%}")
    if isinstance(seconds, (int, float)):
        parts.append(f"{seconds:.1f} s")
    nodes = entry.get("nodes")
    if isinstance(nodes, dict):
        parts.append(f"{len(nodes)} nodes")
    if isinstance(entry.get("uplink_bytes"), int):
        parts.append(f"{entry['uplink_bytes']:,} bytes up")
    left_out = entry.get("rejections")
    if isinstance(left_out, list):
        parts += [
            f"left out {name.get('node')}: {name.get('reason')}"
            for name in left_out
            if isinstance(name, dict)
        ]
    return ", ".join(parts)


def _finish(state: RunState, as_json: bool, result: dict[str, Any]) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(state), **result}))
    else:
        for key, value in result.items():
            typer.echo(f"{key.replace('_', ' '):<26} {_text(value)}")
        typer.echo(f"{'run':<26} {state.run_id} {state.status} after {state.elapsed:.0f} s")
    if not state.completed:
        raise FleetError(
            f"run {state.run_id} ended as {state.status}"
            + (f": {state.details}" if state.details else "; see the log of the server")
        )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _as_interruption(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for a service manager's signal, so that all started processes are ended in order."""
    raise KeyboardInterrupt
