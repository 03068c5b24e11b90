"""What the server runs."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_elastic.flower import PartialUpdates

from .task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    torch.manual_seed(0)
    strategy = PartialUpdates(FedAvg())
    rounds = int(context.run_config["num-server-rounds"])
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)
