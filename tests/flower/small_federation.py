"""Small federations: elastic clients on real models, scripted clients, and dense references."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Result,
    Strategy,
)  # fmt: skip
from in_process_grid import InProcessGrid
from numpy.typing import NDArray
from small_models import Batch, conv_net, images, loss_fn
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.records import evaluate_reply, read_instruction, train_reply
from fl_elastic.update import Manifest, PartialUpdate, encode, weights_of
from fl_elastic.update.model_wire import decode_weights

Weights = dict[str, NDArray[Any]]
UpdateOf = Callable[[Weights, int], PartialUpdate]
Alter = Callable[[Message], Message]

EXAMPLES = (6, 18, 12, 24)
"""Unequal example counts of four clients."""


def build(norm: str = "batch", seed: int = 7) -> nn.Sequential:
    """The network of convolutions, with the same weights each time."""
    torch.manual_seed(seed)
    return conv_net(norm)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def local_data(node: int) -> list[Batch]:
    """Batches of 6 images; as many as ``EXAMPLES`` says."""
    return images(EXAMPLES[node - 1] // 6, seed=node)


def elastic_client(
    model: nn.Module, node: int, policy: str = "full", **options: Any
) -> ElasticClient:
    options.setdefault("budget", Budget())
    return ElasticClient(
        model, local_data(node), images(2, seed=99),
        policy=policy, loss_fn=loss_fn, optimizer_fn=plain_sgd, **options,
    )  # fmt: skip


def legacy_app(client_of: Callable[[], ElasticClient]) -> ClientApp:
    """The app that a user of NumPyClient writes."""
    return ClientApp(lambda context: client_of().to_client())


def as_record(weights: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in weights.items()})


def as_weights(record: ArrayRecord) -> Weights:
    return {name: array.numpy() for name, array in record.items()}


def arrays_of(model: nn.Module) -> ArrayRecord:
    return as_record(weights_of(model, Manifest.of(model)))


def quiet(kind: type[FedAvg] = FedAvg, nodes: int = 4, **options: Any) -> FedAvg:
    """An inner strategy that trains all nodes and lets none evaluate."""
    options = {"fraction_evaluate": 0.0, "min_available_nodes": nodes} | options
    return kind(**options)


SERVERS: dict[str, Callable[[], FedAvg]] = {
    "fedavg": lambda: quiet(FedAvg),
    "fedavgm": lambda: quiet(FedAvgM, server_momentum=0.9),
    "fedadam": lambda: quiet(FedAdam, eta=0.05, tau=0.01),
    "fedyogi": lambda: quiet(FedYogi, eta=0.05, tau=0.01),
    "fedadagrad": lambda: quiet(FedAdagrad, eta=0.05, tau=0.01),
}
"""Server optimisers of Flower's own."""


def run(
    strategy: Strategy,
    apps: Mapping[int, ClientApp],
    arrays: ArrayRecord,
    rounds: int = 1,
    alter: Alter = lambda reply: reply,
    **options: Any,
) -> tuple[Result, InProcessGrid]:
    grid = InProcessGrid(len(apps), apps.__getitem__, alter)
    result = strategy.start(
        grid=grid, initial_arrays=arrays, num_rounds=rounds, timeout=1, **options
    )
    return result, grid


def scripted_app(manifest: Manifest, update_of: UpdateOf, codec: str = "fp32") -> ClientApp:
    """A client whose update is computed from the global weights and the round, without a model."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: object) -> Message:
        arrays, _config = read_instruction("train", message.content)
        weights, version = decode_weights(arrays[0].tobytes(), manifest)
        update = update_of(weights, version)
        packed = np.frombuffer(encode(update, manifest, codec), dtype=np.uint8)
        reply = train_reply([packed], update.num_examples, {"train-loss": 1.0 / version})
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: object) -> Message:
        arrays, _config = read_instruction("evaluate", message.content)
        weights, version = decode_weights(arrays[0].tobytes(), manifest)
        update = update_of(weights, version)
        loss = float(sum(np.abs(array).sum() for array in weights.values()))
        reply = evaluate_reply(loss, update.num_examples, {"accuracy": 0.1 * update.num_examples})
        return Message(reply, reply_to=message)

    return app


class Around(Strategy):
    """A wrapper of a user, with a name of its own for what it wraps."""

    def __init__(self, base: Strategy) -> None:
        self.base = base

    def configure_train(self, *arguments: Any) -> Any:
        return self.base.configure_train(*arguments)

    def configure_evaluate(self, *arguments: Any) -> Any:
        return self.base.configure_evaluate(*arguments)

    def aggregate_train(self, *arguments: Any) -> Any:
        return self.base.aggregate_train(*arguments)

    def aggregate_evaluate(self, *arguments: Any) -> Any:
        return self.base.aggregate_evaluate(*arguments)

    def summary(self) -> None:
        self.base.summary()


class _Reference(Strategy):
    """Delegates to ``inner``; subclasses turn replies of clients into dense ones."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.weights = as_weights(arrays)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content = self.instruction(server_round, message.content)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answered = list(replies)
        for message, (weights, examples) in zip(answered, self.dense(answered), strict=True):
            metrics = MetricRecord({"num-examples": examples})
            message.content = RecordDict({"arrays": as_record(weights), "metrics": metrics})
        return self.inner.aggregate_train(server_round, answered)

    def configure_evaluate(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, *arguments: Any, **options: Any) -> None:
        return None

    def summary(self) -> None:
        self.inner.summary()

    @abstractmethod
    def instruction(self, server_round: int, content: RecordDict) -> RecordDict: ...

    @abstractmethod
    def dense(self, replies: list[Message]) -> list[tuple[Weights, int]]: ...


class DenseLists(_Reference):
    """Sends and takes plain lists of arrays, as a server that knows nothing of fl_elastic."""

    def instruction(self, server_round: int, content: RecordDict) -> RecordDict:
        arrays = {
            str(index): Array("", (), "numpy.ndarray", ndarray_to_bytes(array))
            for index, array in enumerate(self.weights.values())
        }
        return RecordDict(
            {"fitins.parameters": ArrayRecord(arrays), "fitins.config": ConfigRecord()}
        )

    def dense(self, replies: list[Message]) -> list[tuple[Weights, int]]:
        found = []
        for message in replies:
            arrays = message.content.array_records["fitres.parameters"].values()
            examples = message.content.metric_records["fitres.num_examples"]["num_examples"]
            values = [bytes_to_ndarray(array.data) for array in arrays]
            found.append((dict(zip(self.weights, values, strict=True)), examples))
        return found


class Completed(_Reference):
    """Completes scripted updates, with the contributors' mean or the global value, in plain numpy."""

    def __init__(self, inner: Strategy, scripts: Mapping[int, UpdateOf], fill: str) -> None:
        super().__init__(inner)
        self.scripts = scripts
        self.fill = fill
        self.server_round = 0

    def instruction(self, server_round: int, content: RecordDict) -> RecordDict:
        self.server_round = server_round
        return content

    def dense(self, replies: list[Message]) -> list[tuple[Weights, int]]:
        nodes = [message.metadata.src_node_id for message in replies]
        updates = [self.scripts[node](self.weights, self.server_round) for node in nodes]
        return complete(self.weights, updates, self.fill)


def complete(
    weights: Weights, updates: list[PartialUpdate], fill: str
) -> list[tuple[Weights, int]]:
    """The whole model of each client: base plus delta, and a stand-in where it did not train."""
    missing = {}
    for name, base in weights.items():
        parts = [(each.num_examples, each.deltas[name]) for each in updates if name in each.deltas]
        mean = sum(n * delta for n, delta in parts) / sum(n for n, _ in parts) if parts else 0.0
        missing[name] = base if fill == "all" else base + mean
    return [
        (
            {
                name: base + each.deltas[name] if name in each.deltas else missing[name]
                for name, base in weights.items()
            },
            each.num_examples,
        )
        for each in updates
    ]


def silent_app() -> ClientApp:
    """Answers every training instruction with nothing of use, for references that script replies."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: object) -> Message:
        return Message(RecordDict(), reply_to=message)

    return app


def assert_close(
    found: ArrayRecord | Mapping[str, NDArray[Any]],
    expected: ArrayRecord | Mapping[str, NDArray[Any]],
    rtol: float = 1e-6,
    atol: float = 1e-7,
) -> None:
    """Compare values; types are compared with the model's, because FedAdam itself returns float64."""
    one, other = (as_weights(x) if isinstance(x, ArrayRecord) else x for x in (found, expected))
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.dtype == np.float32, name
        np.testing.assert_allclose(array, other[name], rtol=rtol, atol=atol, err_msg=name)


def assert_identical(found: ArrayRecord, expected: ArrayRecord) -> None:
    one, other = as_weights(found), as_weights(expected)
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert array.tobytes() == other[name].tobytes(), name
