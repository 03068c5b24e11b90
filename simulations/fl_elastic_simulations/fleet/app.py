"""The app of a real fleet: every node trains its own client of a scenario, for one method and seed.

Run config, all of it the operator's: ``scenario`` (as JSON text), ``method`` (empty: the first whose policy
selects), ``seed``, ``results`` (an absolute folder: journal, checkpoints, summary), ``data-root`` (the
server's, for its test of the model), ``resume``, ``round-timeout`` and ``node-timeout`` in seconds. Node config,
all of it the node's: see `fl_elastic.flower.node_app.NodeConfig`.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_elastic.flower.node_app import CaredFor, NodeConfig, app_of

__all__ = ["client_app", "server_app"]


def _node(config: dict[str, Any], context: Context) -> CaredFor:
    # A client's process lives for one message: what it does not need is not loaded.
    from fl_elastic_simulations.fleet.node import ScenarioNode

    return ScenarioNode(NodeConfig.of(context.node_config), config).cared_for()


client_app = app_of(_node)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are still to do."""
    from fl_elastic_simulations.fleet.server import FleetRun

    FleetRun.of(context.run_config).run(grid)
