"""A Flower app that sends MobileNetV2 to nodes and back, packed or as Flower's own examples do it: for a benchmark.

Its run configuration names the ``way`` ("unpacked", "packed", with "head" and "int8" in it for those), the
number of ``nodes`` and ``rounds``, and the file for its ``results``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.records import read_instruction, train_reply
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.named_models import resolve_model
from fl_elastic.update import Manifest, weights_of

__all__ = ["client_app", "server_app"]

_EXAMPLES = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = resolve_model("mobilenet_v2", 1000)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    # Without statistics an untrained model's signal dies out, and with it every gradient of the head.
    with torch.no_grad():
        model.train()(torch.randn(_EXAMPLES, 3, 32, 32))
    return model


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take one step, and reply in the run's way."""
    torch.set_num_threads(1)
    model, way = _model(), str(context.run_config["way"])
    # Flower stores equal objects once, so that two nodes' equal replies would travel as one.
    torch.manual_seed(context.node_id % 2**63)
    batch = torch.randn(_EXAMPLES, 3, 32, 32), torch.arange(_EXAMPLES)
    if way == "unpacked":
        return _plain_step(message, model, batch)
    arrays, config = read_instruction("train", message.content)
    client = ElasticClient(
        model, [batch], [batch], budget=Budget(),
        policy="head" if "head" in way else "full", codec="int8" if "int8" in way else "fp32",
    )  # fmt: skip
    return Message(train_reply(*client.fit(arrays, config)), reply_to=message)


def _plain_step(
    message: Message, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> Message:
    """As Flower's own examples do it: the state_dict there and back."""
    received = message.content["arrays"]
    assert isinstance(received, ArrayRecord)
    model.load_state_dict(received.to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    content = RecordDict({
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": _EXAMPLES}),
    })  # fmt: skip
    return Message(content, reply_to=message)


class _Counted(FedAvg):
    """Counts the replies that it averages."""

    merged = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as ever."""
        kept = list(replies)
        self.merged += sum(reply.has_content() for reply in kept)
        return super().aggregate_train(server_round, kept)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for the nodes, run the rounds, and write seconds and merged replies."""
    settings, model = context.run_config, _model()
    nodes = int(settings["nodes"])
    plain = _Counted(fraction_evaluate=0.0, min_available_nodes=nodes)
    accepted: list[int] = []
    strategy: FedAvg | PartialUpdates = plain
    first = ArrayRecord(model.state_dict())
    if settings["way"] != "unpacked":
        strategy = PartialUpdates(plain, on_round=lambda each: accepted.append(len(each.accepted)))
        weights = weights_of(model, Manifest.of(model))
        first = ArrayRecord({name: Array(array) for name, array in weights.items()})
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    started = time.monotonic()
    strategy.start(grid, first, num_rounds=int(settings["rounds"]), timeout=600)
    merged = plain.merged if strategy is plain else sum(accepted)
    found = {"seconds": time.monotonic() - started, "merged": merged}
    Path(str(settings["results"])).write_text(json.dumps(found))
