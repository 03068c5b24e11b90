"""Cost of merging one round's replies in this process, by `PartialUpdates` and by Flower's own FedAvg."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torchvision
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fl_elastic.flower.records import train_reply
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.update import Manifest, PartialUpdate, encode, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid

FLOWER = "flower fedavg"
"""Whole models, merged by Flower's own strategy."""

NUMPY = ("numpy, float32", "numpy, float64")
"""Arrays in memory, added tensor by tensor without decoding or checks, in either precision."""

MERGED = (FLOWER, "partial updates, all tensors", "partial updates, last quarter")
"""Kinds of replies: whole models, updates of every tensor, updates of a quarter of the numbers."""

WRITTEN = ("fp32", "int8", "bf16")
"""Codecs of the updates for models of equal tensors."""

MOST_KEPT = 100
"""Most replies with bytes of their own: Flower keeps every reply, so beyond this number they share bytes."""


_Row = dict[str, float]


def merging_cost(kind: str, replies: int) -> _Row:
    """Merge replies of a model of MobileNetV2's size once; call it in a fresh process.

    Returns
    -------
    dict
        Total ``cpu_seconds``, ``seconds_per_reply``, and ``peak_models``: the largest resident set beyond that
        before the first reply, in multiples of the parameters' size.
    """
    model = torchvision.models.mobilenet_v2()
    manifest = Manifest.of(model)
    weights = weights_of(model, manifest)
    floats = [n for n in manifest.names if manifest.role(n) is Role.PARAMETER]
    size = sum(weights[name].nbytes for name in floats)
    if kind == FLOWER:
        row, before = _merged_by_flower({name: weights[name] for name in floats}, replies)
    else:
        trained = floats if kind == MERGED[1] else _last_quarter(floats, weights)
        row, before = _merged_partially(weights, manifest, trained, "fp32", replies)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**row, "peak_models": max(peak - before, 0) / size}


def tensors_cost(kind: str, tensors: int, replies: int, *, numbers: int = 2_500_000) -> _Row:
    """Merge replies about a model of equal tensors once, in this process.

    Parameters
    ----------
    kind : str
        `FLOWER`, one of `NUMPY`, or the codec of updates of all tensors.
    tensors, numbers : int
        Numbers of tensors and of weights; by default the weights take 10 MB in single precision.
    replies : int
        Number of replies, at most `MOST_KEPT`.

    Returns
    -------
    dict
        Total ``cpu_seconds``, ``seconds_per_reply``, and for Flower ``freed_seconds_per_reply``: the time to free
        the memory of replies, which for the other kinds is part of ``cpu_seconds``.
    """
    rng = np.random.default_rng(1)
    each = numbers // tensors
    weights: dict[str, NDArray[Any]] = {
        f"layer{index}.weight": rng.standard_normal((each // 125, 125)).astype(np.float32)
        for index in range(tensors)
    }
    if kind in NUMPY:
        return _added_by_numpy(weights, replies, kind.rpartition(" ")[2])
    if kind == FLOWER:
        return _merged_by_flower(weights, replies)[0]
    manifest = Manifest.of_arrays(weights)
    return _merged_partially(weights, manifest, list(weights), kind, replies)[0]


def _merged_by_flower(parameters: dict[str, NDArray[Any]], replies: int) -> tuple[_Row, float]:
    """Return the cost of merging, and the resident memory before the first reply."""
    # Sets the run that Flower's messages need.
    InProcessGrid(1, ClientApp())
    record = ArrayRecord({name: Array(array) for name, array in parameters.items()})
    before = _resident()
    messages = list(_dense_replies(record, replies))
    row = _row(_timed(lambda: FedAvg().aggregate_train(1, messages)), replies)
    freed = _timed(lambda: _give_back(messages))
    return {**row, "freed_seconds_per_reply": freed / replies}, before


def _added_by_numpy(parameters: dict[str, NDArray[Any]], replies: int, precision: str) -> _Row:
    """Return the cost of the plain additions that any mean needs, for replies with memory of their own."""
    arrays = [[each.copy() for each in parameters.values()] for _ in range(replies)]
    sums = [np.zeros(each.shape, precision) for each in parameters.values()]
    factor = np.dtype(precision).type(1 / replies)

    def add() -> None:
        for reply in arrays:
            for total, array in zip(sums, reply, strict=True):
                total += array * factor

    # The first pass allocates the memory of the sums.
    add()
    return _row(_timed(add), replies)


def _merged_partially(
    weights: dict[str, NDArray[Any]],
    manifest: Manifest,
    trained: list[str],
    codec: str,
    replies: int,
) -> tuple[_Row, float]:
    """Return the cost of merging, and the resident memory before the first reply."""
    rng = np.random.default_rng(0)
    # Small compared with the model, as in a real round: large updates would be held back for comparison.
    deltas = {n: (0.01 * rng.standard_normal(weights[n].shape)).astype(np.float32) for n in trained}
    packed = encode(PartialUpdate(deltas, dict.fromkeys(deltas, 8), 100, 1), manifest, codec)
    strategy = PartialUpdates(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1)
    )
    start = ArrayRecord({name: Array(array) for name, array in weights.items()})
    grid = InProcessGrid(1, ClientApp())
    list(strategy.configure_train(1, start, ConfigRecord(), grid))
    made = _Arriving(packed, replies)
    before = _resident()
    seconds = _timed(lambda: strategy.aggregate_train(1, iter(made))) - made.seconds
    return _row(seconds, replies), before


def _row(seconds: float, replies: int) -> _Row:
    return {"cpu_seconds": seconds, "seconds_per_reply": seconds / replies}


def _give_back(messages: list[Message]) -> None:
    for message in messages:
        for record in message.content.array_records.values():
            record.clear()


def _dense_replies(parameters: ArrayRecord, replies: int) -> Iterator[Message]:
    for _ in range(replies):
        arrays = parameters
        if replies <= MOST_KEPT:
            # As over the network, each reply has bytes of its own.
            arrays = ArrayRecord(
                {
                    name: Array(a.dtype, tuple(a.shape), a.stype, bytes(bytearray(a.data)))
                    for name, a in parameters.items()
                }
            )
        metrics = MetricRecord({"num-examples": 100, "loss": 1.0})
        yield _message(RecordDict({"arrays": arrays, "metrics": metrics}))


class _Arriving:
    """Replies with bytes of their own, as from the network; ``seconds`` is the time spent on making them."""

    def __init__(self, packed: bytes, replies: int) -> None:
        self.seconds = 0.0
        self._replies = replies
        self._records = dict(
            train_reply([np.frombuffer(packed, np.uint8)], 100, {"train-loss": 1.0})
        )
        (self._array,) = cast(ArrayRecord, self._records.pop("fitres.parameters")).values()

    def __iter__(self) -> Iterator[Message]:
        for node in range(1, self._replies + 1):
            started = time.process_time()
            content = {**self._records, "fitres.parameters": self._own_array()}
            reply = _message(RecordDict(content), node)
            self.seconds += time.process_time() - started
            yield reply

    def _own_array(self) -> ArrayRecord:
        array = self._array
        data = array.data[:-1] + array.data[-1:]
        return ArrayRecord({"0": Array(array.dtype, tuple(array.shape), array.stype, data)})


def _last_quarter(names: list[str], weights: dict[str, NDArray[Any]]) -> list[str]:
    """Return the tensors nearest to the output that together hold up to a quarter of the numbers."""
    left = sum(weights[name].size for name in names) / 4
    chosen: list[str] = []
    for name in reversed(names):
        if weights[name].size <= left:
            chosen.append(name)
            left -= weights[name].size
    return chosen


def _message(content: RecordDict, node: int = 1) -> Message:
    asked = Message(RecordDict(), dst_node_id=node, message_type="train")
    asked.metadata.__dict__["_message_id"] = "asked"
    return Message(content, reply_to=asked)


def _resident() -> float:
    gc.collect()
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _timed(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
