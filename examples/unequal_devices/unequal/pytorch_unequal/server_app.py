"""What the server runs."""

from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_elastic_simulations.unequal import Fleet, UnequalGrid

from .task import Net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    grid = UnequalGrid(grid, Fleet.load(Path(__file__).with_name("fleet.toml")))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(net)
        log(INFO, "round %d: accuracy %.3f, second %.2f", server_round, accuracy, grid.now)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=float(config["fraction-evaluate"]))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": float(config["learning-rate"])}),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
        timeout=float(config["timeout"]),
    )
    if config["rows"]:
        grid.save(str(config["rows"]))
