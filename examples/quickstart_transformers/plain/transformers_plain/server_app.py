"""What the server runs."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .task import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    rounds = int(context.run_config["num-server-rounds"])
    model = get_model(str(context.run_config["model-name"]))
    FedAvg().start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
