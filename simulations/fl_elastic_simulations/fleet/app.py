"""The app of a real fleet: every node trains its own client of a scenario, for one method and seed.

Run config, all of it the operator's: ``scenario`` (as JSON text), ``method`` (empty: the first whose policy
selects), ``seed``, ``results`` (an absolute folder: journal, checkpoints, summary), ``data-root`` (the
server's, for its test of the model), ``resume``, ``round-timeout`` and ``node-timeout`` in seconds. Node config,
all of it the node's: see `fl_elastic_simulations.fleet.settings.NodeSettings`.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_elastic.errors import ElasticError
from fl_elastic.flower.wire import ERROR, evaluate_reply, read_instruction, train_reply

__all__ = ["client_app", "server_app"]

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train; what fl_elastic foresees to go wrong is said to the server instead of raised."""
    arrays, config = read_instruction("train", message.content)
    try:
        reply = _node(config, context).train(arrays)
    except ElasticError as error:
        reply = train_reply([], 0, {ERROR: str(error)})
    return Message(reply, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate, or say what the device can do."""
    arrays, config = read_instruction("evaluate", message.content)
    try:
        reply = _node(config, context).evaluate(arrays)
    except ElasticError as error:
        reply = evaluate_reply(0.0, 0, {ERROR: str(error)})
    return Message(reply, reply_to=message)


def _node(config: dict[str, Any], context: Context) -> Any:
    # A client's process lives for one message: what it does not need is not loaded.
    from fl_elastic.training.lean_start import without_compiler
    from fl_elastic_simulations.fleet.node import FleetNode
    from fl_elastic_simulations.fleet.settings import NodeSettings

    without_compiler()

    return FleetNode(NodeSettings.of(context.node_config), config)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are still to do."""
    from fl_elastic_simulations.fleet.server import FleetRun

    FleetRun.of(context.run_config).run(grid)
