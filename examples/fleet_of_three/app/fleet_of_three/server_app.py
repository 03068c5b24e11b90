"""What the server runs."""

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_elastic.flower import Checkpointed, PartialUpdates, RoundRecord
from fl_elastic.operations import Journal

from .task import network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; each leaves a checkpoint, and a line that `fl-elastic fleet status` reads."""
    results, nodes = Path(str(context.run_config["results"])), int(context.run_config["num-nodes"])
    journal = Journal(results / "rounds.jsonl")

    def write_down(record: RoundRecord) -> None:
        names = {node.node_id: node.name for node in grid.get_nodes()}
        told = {
            names.get(reply.node_id) or str(reply.node_id): {
                **{key.replace("-", "_"): value for key, value in reply.metrics.items()},
                "uplink_bytes": reply.uplink_bytes,
            }
            for reply in record.accepted
        }
        journal.append({"round": record.server_round, "time": time.time(), "nodes": told})

    torch.manual_seed(0)
    inner = FedAvg(min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
    strategy = Checkpointed(
        PartialUpdates(inner, on_round=write_down),
        results / "checkpoints",
        resume=bool(context.run_config["resume"]),
    )
    rounds = int(context.run_config["num-server-rounds"])
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
