"""What merging one round's replies costs this process, by `PartialUpdates` and by Flower's own FedAvg."""

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

__all__ = ["MERGED", "MOST_KEPT", "merging_cost"]

MERGED = ("flower fedavg", "partial updates, all tensors", "partial updates, last quarter")
"""What is merged: whole models, updates of every tensor, updates of a quarter of the numbers."""

MOST_KEPT = 100
"""Flower keeps every reply: beyond this many they share their bytes, and memory says nothing."""


def merging_cost(kind: str, replies: int) -> dict[str, float]:
    """Merge replies of a MobileNetV2-sized model once, in this process, which should be a fresh one.

    Returns
    -------
    dict
        ``cpu_seconds`` in all, ``seconds_per_reply``, and ``peak_models``: the largest resident set over what there
        was before the first reply, in sizes of the parameters.
    """
    model = torchvision.models.mobilenet_v2()
    manifest = Manifest.of(model)
    weights = weights_of(model, manifest)
    floats = [n for n in manifest.names if manifest.role(n) is Role.PARAMETER]
    size = sum(weights[name].nbytes for name in floats)
    start = ArrayRecord({name: Array(array) for name, array in weights.items()})
    grid = InProcessGrid(1, ClientApp())
    if kind == MERGED[0]:
        parameters = ArrayRecord({name: Array(weights[name]) for name in floats})
        before = _resident()
        messages = list(_dense_replies(parameters, replies))
        seconds = _timed(lambda: FedAvg().aggregate_train(1, messages))
    else:
        trained = floats if kind == MERGED[1] else _last_quarter(floats, weights)
        rng = np.random.default_rng(0)
        # Small beside the model, as those of a round are: larger ones wait to be compared with each other.
        deltas = {
            n: (0.01 * rng.standard_normal(weights[n].shape)).astype(np.float32) for n in trained
        }
        packed = encode(PartialUpdate(deltas, dict.fromkeys(deltas, 8), 100, 1), manifest)
        strategy = PartialUpdates(
            FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1)
        )
        list(strategy.configure_train(1, start, ConfigRecord(), grid))
        made = _Arriving(packed, replies)
        before = _resident()
        seconds = _timed(lambda: strategy.aggregate_train(1, iter(made))) - made.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "cpu_seconds": seconds,
        "seconds_per_reply": seconds / replies,
        "peak_models": max(peak - before, 0) / size,
    }


def _dense_replies(parameters: ArrayRecord, replies: int) -> Iterator[Message]:
    for _ in range(replies):
        arrays = parameters
        if replies <= MOST_KEPT:
            # As over the network: each reply has bytes of its own.
            arrays = ArrayRecord(
                {
                    name: Array(a.dtype, tuple(a.shape), a.stype, bytes(bytearray(a.data)))
                    for name, a in parameters.items()
                }
            )
        metrics = MetricRecord({"num-examples": 100, "loss": 1.0})
        yield _message(RecordDict({"arrays": arrays, "metrics": metrics}))


class _Arriving:
    """Replies with bytes of their own, as they come from the network; what making them takes is told apart."""

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
    """Return tensors from the output on that together hold a quarter of the numbers."""
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
