"""``fl-elastic fleet server`` and ``fleet node``: replace this process by Flower's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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

    It needs fleet.toml and server/ of the fleet's folder; the authority's key can be kept elsewhere. Whoever
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
