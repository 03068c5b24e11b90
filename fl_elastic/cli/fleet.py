"""``fl-elastic fleet``: keys, nodes and processes of a fleet of real devices."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fl_elastic.cli.fleet_runs import submit, up
from fl_elastic.cli.fleet_status import status
from fl_elastic.cli.tables import print_table, say, show_changes, show_registrations
from fl_elastic.errors import FleetError
from fl_elastic.laboratory import from_laboratory

if TYPE_CHECKING:
    from fl_elastic.fleet.doctor.finding import Finding
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.register import Registration
    from fl_elastic.fleet.serve import Launch


_Print = Annotated[
    bool, typer.Option("--print", help="Print the command line as JSON instead of running it.")
]


def server(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the fleet.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; nodes of other machines need another one.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port; by default the inventory's.")] = None,
    only_print: _Print = False,
) -> None:
    """Run the fleet's server in the foreground: this process becomes flower-superlink.

    It needs fleet.toml and server/ of the fleet's folder; the authority's key can be kept elsewhere. Anyone who
    reaches the port can submit runs, and every node executes their code. By default it therefore listens on this
    machine only: put the gateway (deploy/gateway) before it, or give an address in the fleet's own network, behind
    a firewall.
    """
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.serve import become, server_launch

    launch = server_launch(FleetFolder(folder), os.environ, host, port)
    if only_print:
        _show(launch)
        return
    become(launch)


def node(
    folder: Annotated[
        Path, typer.Argument(metavar="NODE_DIR", help="Folder of the node: nodes/NAME or its copy.")
    ],
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="State folder; by default that of node.toml or systemd, else NODE_DIR/state.",
        ),
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of datasets; FL_ELASTIC_DATA_ROOT does the same.")
    ] = None,
    runtime_port: Annotated[
        int | None,
        typer.Option(help="Loopback port of its own helpers; one for each node of a machine."),
    ] = None,
    only_print: _Print = False,
) -> None:
    """Run a node in the foreground: this process becomes flower-supernode.

    A server that does not know the node's key refuses it ("Failed to activate"), and the node ends: run "fl-elastic
    fleet register FLEET" on the server first.

    The server also refuses a node that died unexpectedly and returns within 60 seconds; let the service manager
    restart it until it is accepted (RestartSec). The clock must be right to 300 seconds: start the node after the
    time is synchronised.
    """
    from fl_elastic.fleet.layout import NodeFolder
    from fl_elastic.fleet.serve import become, node_launch

    launch = node_launch(
        NodeFolder(folder), os.environ,
        state=state_dir, data_root=data_root, runtime_port=runtime_port,
    )  # fmt: skip
    if only_print:
        _show(launch)
        return
    become(launch)


def _show(launch: Launch) -> None:
    changed = {k: v for k, v in launch.environment.items() if os.environ.get(k) != v}
    typer.echo(
        json.dumps(
            {"command": launch.command, "environment": changed, "folder": str(launch.folder)}
        )
    )


fleet = typer.Typer(
    help="Set up and run a fleet of real devices: a server and nodes, with TLS and keys.",
    no_args_is_help=True,
)
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the fleet.")]
_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting of the node: deadline=60, threads=2 (repeatable)."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_JOURNALS = ("rounds.jsonl", "metrics.jsonl")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


@fleet.command()
def init(
    folder: _Folder,
    server_address: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or IP address of the server, the preferred one first (repeatable)."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the server; 8000 in a new fleet.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="Name of a node (repeatable).")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes, named node0, node1, ...")] = 0,
    as_json: _Json = False,
) -> None:
    """Make a fleet's folder: authority, server certificate, one key per node, inventory.

    It can be run again at any time: keys and certificates stay unchanged, missing files are added, permissions are
    repaired, and with other addresses the server gets a new certificate.
    """
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.provision import Wanted, numbered, provision

    wanted = Wanted(server_address or (), port, (*(node or ()), *numbered(nodes)))
    show_changes(provision(FleetFolder(folder), wanted), as_json)


@fleet.command()
def add(folder: _Folder, name: str, setting: _Settings = None, as_json: _Json = False) -> None:
    """Add a node, or change the settings of an existing one."""
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.members import add_node
    from fl_elastic.fleet.names import parse_settings

    show_changes(add_node(FleetFolder(folder), name, parse_settings(setting or ())), as_json)


@fleet.command()
def revoke(folder: _Folder, name: str, as_json: _Json = False) -> None:
    """Shut a node out: its key is never registered again, and the server is told if it answers."""
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.members import revoke_node

    place = FleetFolder(folder)
    revoke_node(place, name)
    show_registrations(_registered_if_possible(place, name), as_json)


@fleet.command()
def rotate(
    folder: _Folder,
    name: Annotated[str | None, typer.Argument(help="Node that gets a new key.")] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Give the server a new key and certificate.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Give a node or the server a new key.

    A node's old key is deleted and unregistered, and a revoked node is accepted again: copy its folder to the
    device. After rotating the server's key, restart the server; nodes need no change, because the authority is the
    same.
    """
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.members import rotate_node, rotate_server

    place = FleetFolder(folder)
    if (name is None) == (not server):
        raise FleetError("say what gets a new key: the name of a node, or --server")
    if name is None:
        show_changes(rotate_server(place, datetime.now(UTC)), as_json)
        return
    changes = rotate_node(place, name)
    if not as_json:
        show_changes(changes, as_json)
    done = _registered_if_possible(place, name)
    show_registrations(done, as_json)
    _fail_if_refused(done)


@fleet.command()
def register(folder: _Folder, as_json: _Json = False) -> None:
    """Tell the running server which keys may join, and unregister revoked ones."""
    from fl_elastic.fleet.flower_cli import flower_at
    from fl_elastic.fleet.inventory import load_inventory
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.register import register as register_all

    place = FleetFolder(folder)
    done = register_all(place, flower_at(place, load_inventory(place.inventory).server))
    show_registrations(done, as_json)
    _fail_if_refused(done)


def _fail_if_refused(done: list[Registration]) -> None:
    """Raise FleetError if a key was refused for another reason than its revocation."""
    refused = [
        registration
        for registration in done
        if registration.what == "refused" and registration.why != "revoked"
    ]
    if refused:
        raise FleetError(f"{refused[0].name}: {refused[0].why}")


def _registered_if_possible(folder: FleetFolder, name: str) -> list[Registration]:
    """Update the server's registration of one node; if the server does not answer, run ``register`` later."""
    from fl_elastic.fleet.flower_cli import ServerUnreachable, flower_at
    from fl_elastic.fleet.inventory import load_inventory
    from fl_elastic.fleet.register import register as register_all

    try:
        flower = flower_at(folder, load_inventory(folder.inventory).server)
        return [
            registration
            for registration in register_all(folder, flower)
            if registration.name == name
        ]
    except ServerUnreachable:
        say(
            "the server does not answer and has not been told; when it does, run: "
            f"fl-elastic fleet register {folder.root}"
        )
        return []


fleet.command()(server)


fleet.command()(node)


fleet.command()(submit)


fleet.command()(status)


fleet.command()(up)


@fleet.command()
def exporter(
    directory: Annotated[
        Path, typer.Option(help="Folder of the journal: the server's results, or a node's state.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any.")] = 9464,
    address: Annotated[
        str, typer.Option(help="Address to listen on; there is no password.")
    ] = "127.0.0.1",
) -> None:
    """Serve the newest round of a server or node as Prometheus metrics, until it is stopped."""
    from fl_elastic.monitoring.exporter import serve_metrics

    found = [directory / name for name in _JOURNALS if (directory / name).exists()]
    # Before the first round neither file exists; the folder's name tells a server from a node.
    default = directory / _JOURNALS[0 if directory.name == "results" else 1]
    server = serve_metrics(found[0] if found else default, address=address, port=port)
    say(f"serving http://{address}:{server.server_port}/metrics")
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    done.wait()
    server.shutdown()


@fleet.command()
def export(
    results: Annotated[Path, typer.Argument(help="Folder of the run's results.")],
    output: Annotated[Path, typer.Argument(help="File to write: *.safetensors or *.onnx.")],
    scenario: Annotated[
        Path | None, typer.Option(help="Scenario file, if the results do not hold it.")
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of datasets; FL_ELASTIC_DATA_ROOT does the same.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the model of a run's newest checkpoint to a file that other programs can read."""
    done = from_laboratory("export_run")(results, output, scenario=scenario, data_root=data_root)
    if as_json:
        typer.echo(json.dumps(done))
    else:
        say(f"{done['file']}: round {done['round']}, {done['bytes']:,} bytes")


@fleet.command()
def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR|NODE_DIR]", help="Folder of a fleet or of a node."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Train a tiny model once: does torch work here?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and the folder's keys, certificates, server and clock; exit 1 if a check fails."""
    from fl_elastic.fleet.doctor.checkup import check_up

    findings = check_up(folder)
    if self_test:
        from fl_elastic.fleet.doctor.self_test import self_test as train_once

        findings.append(train_once())
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        print_table(_table(findings))
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("check", "")
    for heading in ("seen", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(
            finding.name,
            f"[{colour}]{finding.status}[/]",
            escape(finding.seen),
            escape(finding.remedy),
        )
    return table
