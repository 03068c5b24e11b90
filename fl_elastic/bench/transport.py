"""The same model through a real server as one packed buffer, and as Flower's list of arrays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_elastic.bench.results import Results
from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import RunState
from fl_elastic.fleet.local import SERVER, LocalFleet

__all__ = ["bench_transport"]

_NODES, _ROUNDS = 2, 2
_WAYS = ("unpacked", "packed", "packed, last layers", "packed, last layers, int8")

_PROJECT = """
[project]
name = "transport"
version = "1.0.0"
[tool.flwr.app]
publisher = "fl-elastic"
[tool.flwr.app.components]
serverapp = "transport_app:server_app"
clientapp = "transport_app:client_app"
[tool.flwr.app.config]
way = "packed"
rounds = 1
results = ""
"""

_APP = """
import json
import time
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torchvision.models import mobilenet_v2

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, PartialUpdates
from fl_elastic.flower._compat import ndarray_to_bytes, bytes_to_ndarray
from fl_elastic.flower.wire import read_instruction, train_reply
from fl_elastic.update import Manifest, weights_of


def build():
    torch.manual_seed(0)
    return mobilenet_v2(num_classes=1000)


client_app = ClientApp()


@client_app.train()
def train(message, context):
    from flwr.app import Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    model = build()
    batches = [(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))]
    way = str(context.run_config["way"])
    if way == "unpacked":
        # As Flower's own examples do it: the state_dict there and back.
        arrays = message.content["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()),
                   "metrics": MetricRecord({"num-examples": 4})}
        return Message(RecordDict(content), reply_to=message)
    arrays, config = read_instruction("train", message.content)
    client = ElasticClient(
        model, batches, batches, budget=Budget(), policy="last_k" if "last" in way else "full",
        codec="int8" if "int8" in way else "fp32")
    if "last" in way:
        # So many groups as a quarter of the step pays for.
        client.budget = Budget(speedup=2.5)
    return Message(train_reply(*client.fit(arrays, config)), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid, context):
    way, rounds = str(context.run_config["way"]), int(context.run_config["rounds"])
    model = build()
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=NODES)
    merged = []
    if way == "unpacked":
        first = ArrayRecord(model.state_dict())
        aggregate = strategy.aggregate_train

        def counted(server_round, replies):
            replies = list(replies)
            merged.append(sum(reply.has_content() for reply in replies))
            return aggregate(server_round, replies)

        strategy.aggregate_train = counted
    else:
        strategy = PartialUpdates(
            strategy, on_round=lambda record: merged.append(len(record.accepted)))
        first = ArrayRecord({n: Array(a) for n, a in weights_of(model, Manifest.of(model)).items()})
    while len(list(grid.get_node_ids())) < NODES:
        time.sleep(0.2)
    started = time.monotonic()
    strategy.start(grid, first, num_rounds=rounds, timeout=600)
    Path(str(context.run_config["results"])).write_text(
        json.dumps({"seconds": time.monotonic() - started, "merged": sum(merged)}))
"""


def bench_transport(results: Results, tell: Callable[[str], None] = print) -> None:
    """Send MobileNetV2 (14 MB, 314 arrays) to two nodes of a real fleet and back, with TLS, two rounds each way.

    One local step, so that what is measured is the way of the model: seconds of a round, the server's CPU seconds,
    and the bytes that Flower itself counts.
    """
    missing = [way for way in _WAYS if way not in results.rows]
    if not missing:
        return
    with LocalFleet(_NODES, config={"threads": 1}) as fleet:
        app = fleet.folder.root / "transport"
        app.mkdir()
        (app / "pyproject.toml").write_text(_PROJECT)
        (app / "transport_app.py").write_text(_APP.replace("NODES", str(_NODES)))
        for way in missing:
            results.add(way, _run(fleet, app, way))
            tell(f"{way}: {results.rows[way]['seconds_per_round']:.1f} s a round")


def _run(fleet: LocalFleet, app: Path, way: str) -> dict[str, Any]:
    out = fleet.folder.root / f"{way.replace(', ', '-').replace(' ', '-')}.json"
    pid = fleet.members[SERVER].pid
    before = _cpu_seconds(pid)
    run = fleet.submit(app, way=way, rounds=_ROUNDS, results=str(out))
    state: RunState = fleet.wait(run)
    if not state.completed:
        raise FleetError(f"{way}: the run ended as {state.status}: {state.details}")
    found = json.loads(out.read_text())
    if found["merged"] != _NODES * _ROUNDS:
        # A machine too busy to start a process in thirty seconds loses its message.
        raise FleetError(
            f"{way}: {found['merged']} replies of {_NODES * _ROUNDS}; measure again alone"
        )
    return {
        "seconds_per_round": float(found["seconds"]) / _ROUNDS,
        "server_cpu_seconds": _cpu_seconds(pid) - before,
        "bytes_to_server": state.to_server_bytes,
        "bytes_to_nodes": state.to_nodes_bytes,
        "rounds": _ROUNDS,
        "nodes": _NODES,
    }


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of the SuperLink's own process: the app's server runs in another one."""
    import os

    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
