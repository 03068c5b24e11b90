"""The app of a real fleet: every node trains its own client of a scenario, for one method and seed.

The run config is set by the operator: ``scenario`` (as JSON text), ``method`` (if empty, the first
whose policy trains only part of the model), ``seed``, ``results`` (an absolute folder for journal, checkpoints and
summary), ``data-root`` (of the server, for its test of the model), ``resume``, ``round-timeout`` and
``node-timeout`` in seconds. The node config is set by each node, see `fl_elastic.flower.node_app.NodeConfig`.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_elastic.flower.node_app import NodeMessage, app_of
from fl_elastic.flower.node_config import NodeConfig


def _node(config: dict[str, Any], context: Context) -> NodeMessage:
    # A client's process lives for one message, so modules are only imported where needed.
    from fl_elastic_simulations.fleet.node import ScenarioNode

    return ScenarioNode(NodeConfig.of(context.node_config), config).message()


client_app = app_of(_node)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the remaining rounds."""
    from fl_elastic_simulations.fleet.server import FleetRun

    FleetRun.of(context.run_config).run(grid)
