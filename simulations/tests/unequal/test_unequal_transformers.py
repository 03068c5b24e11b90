"""A model of transformers on unequal devices, trained as in Flower's quickstart of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from layer_apps import fleet
from torch import nn

from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.unequal import UnequalGrid, measuring_mod

transformers = pytest.importorskip("transformers")

LETTERS, LENGTH, EXAMPLES, BATCH, CLASSES = 20, 12, 32, 8, 2


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=LETTERS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=CLASSES,
    )  # fmt: skip
    made: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    return made


def texts(partition: int) -> list[dict[str, torch.Tensor]]:
    """Texts of one class begin with an even letter."""
    random = torch.Generator().manual_seed(partition)
    words = torch.randint(LETTERS, (EXAMPLES, LENGTH), generator=random)
    return [
        {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each[:, 0] % CLASSES}
        for each in words.split(BATCH)
    ]


def client_app() -> ClientApp:
    app = ClientApp(mods=[measuring_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net, arrays = model(), message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        net.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
        net.train()
        loss: Any = None
        for batch in texts(int(context.node_config["partition-id"])):
            loss = net(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": EXAMPLES})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


@pytest.mark.slow
def test_a_model_of_transformers_takes_the_time_of_its_devices() -> None:
    grid = UnequalGrid(InProcessGrid(2, client_app()), fleet(1.0, 8.0, costs={}))
    result = FedAvg(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=8
    )
    losses = [each["train_loss"] for each in result.train_metrics_clientapp.values()]
    assert losses[-1] < losses[0]
    fast, slow = ([row for row in grid.rows if row.client == client] for client in (0, 1))
    assert len(fast) == len(slow) == 8
    assert {row.outcome for row in grid.rows} == {"answered"}
    taken = [sum(row.compute_seconds for row in rows) for rows in (fast, slow)]
    assert taken[1] > 4 * taken[0]
    assert grid.now == pytest.approx(sum(row.arrival - row.sent for row in slow))
