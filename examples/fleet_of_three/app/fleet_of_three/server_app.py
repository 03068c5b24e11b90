"""What the server runs."""

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy

from fl_elastic.flower import Checkpointed, PartialUpdates, RoundRecord
from fl_elastic.monitoring import Journal
from fl_elastic.training import evaluate

from .task import load_data, network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; each leaves a checkpoint, and a line that `fl-elastic fleet status` reads."""
    results, nodes = Path(str(context.run_config["results"])), int(context.run_config["num-nodes"])
    journal, records = Journal(results / "rounds.jsonl"), list[RoundRecord]()
    resume = bool(context.run_config["resume"])
    if not resume:
        journal.remove()
    torch.manual_seed(0)
    model, (_, test_loader) = network(), load_data(0, 1)

    def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        found = evaluate(model, cross_entropy, test_loader)
        names = {node.node_id: node.name for node in grid.get_nodes()}
        journal.append(
            {
                "round": server_round,
                "time": time.time(),
                "accuracy": found.accuracy,
                "nodes": {
                    names.get(reply.node_id) or str(reply.node_id): {
                        **{key.replace("-", "_"): value for key, value in reply.metrics.items()},
                        "uplink_bytes": reply.uplink_bytes,
                    }
                    for record in records
                    if record.server_round == server_round
                    for reply in record.accepted
                },
            }
        )
        return MetricRecord({"loss": found.loss, "accuracy": found.accuracy or 0.0})

    # All that are there train; where one is away, the others go on. Nodes are not asked to test: on devices a
    # message costs more than this test does here.
    least = max(nodes - 1, 1)
    inner = FedAvg(min_train_nodes=least, min_available_nodes=least, fraction_evaluate=0)
    strategy = Checkpointed(
        PartialUpdates(inner, on_round=records.append),
        results / "checkpoints",
        resume=resume,
    )
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=tested,
    )
