"""The records in which packed models and updates travel through Flower.

One set of record keys serves both kinds of client: Flower's adapter for ``NumPyClient`` reads and writes these keys
(``fitins.*``, ``fitres.*``, ``evaluateins.*``, ``evaluateres.*``), and the Message-API app reads them itself, so a
fleet may mix both. The list of arrays holds one array: the packed buffer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib.format import read_array_header_1_0, read_magic
from numpy.typing import NDArray

from fl_elastic.errors import DivergedError, ElasticError, StaleModelError, UpdateError
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.metrics import believed_metrics, left_out_of, warn_of_left_out
from fl_elastic.given import whole

PACKED = "fl_elastic.packed"
"""Config key that marks a message whose model is one packed buffer."""

ERROR = "fl_elastic.error"
"""Metric key under which a client reports why it failed."""

LOSS = "train-loss"
"""Metric key of the training loss on a client's own examples."""

EXAMPLES = "num-examples"
"""Metric key of the number of examples of a client, by which Flower's strategies weight unless told otherwise."""

IMPORTANCE = "fl_elastic.importance"
"""Metric key under which a client reports the importance of its groups, as JSON."""

HAVE = "fl_elastic.have"
"""Metric key under which a client reports which version of the model it keeps."""

STALE = "fl_elastic.stale"
"""Metric key by which a client reports that it needs the whole model."""

DIVERGED = "fl_elastic.diverged"
"""Metric key by which a client reports that a loss or a trained tensor was no longer finite."""

MAY_TRAIN = "fl_elastic.may-train"
"""Metric key under which a client reports which tensors its fit could choose among: indices, as JSON."""

FORGET = "fl_elastic.forget"
"""Metric key under which a client names examples that it wants forgotten, by their digest."""

NAMES = "fl_elastic.names"
"""Config key of the names of the arrays that one of Flower's own strategies sends."""

TENSORS = "fl_elastic.tensors"
"""Metric key of the indices of the arrays in a reply, as a JSON list, if they are not all tensors."""

_LOG = logging.getLogger("fl_elastic")
_NUMPY = "numpy.ndarray"
# Entries that every reply has in its metric records.
_FIXED = ("loss", "num_examples")


@dataclass(frozen=True)
class TrainReply:
    """A client's answer to a training instruction; update and importance are not decoded yet.

    ``size`` is the size in bytes of a whole model that came in place of ``packed``, else 0; ``left_out`` names the
    metrics that are not accepted, and why.
    """

    packed: bytes | memoryview
    num_examples: int
    metrics: dict[str, Any]
    importance: object = None
    may_train: object = None
    have: int | None = None
    size: int = 0
    forget: object = None
    left_out: str = ""


@dataclass(frozen=True)
class EvaluateReply:
    """A client's answer to an evaluation instruction; ``left_out`` names the metrics that are not accepted.

    ``loss`` is None if a plain ``ClientApp`` reports none.
    """

    loss: float | None
    num_examples: int
    metrics: dict[str, Any]
    have: int | None = None
    left_out: str = ""


def as_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return the arrays as one of Flower's records."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def as_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of one of Flower's records."""
    return {name: array.numpy() for name, array in record.items()}


def single_values(config: ConfigRecord) -> dict[str, Any]:
    """Return the settings that a ``NumPyClient`` can read: no lists, and ``server-round`` under both spellings."""
    values: dict[str, Any] = {k: v for k, v in config.items() if not isinstance(v, list)}
    if "server-round" in values:
        values["server_round"] = values["server-round"]
    return values


def instruction(kind: str, packed: bytes, config: ConfigRecord) -> RecordDict:
    """Return the content of a ``train`` or ``evaluate`` message to a client, with `single_values` of ``config``."""
    prefix = {"train": "fitins", "evaluate": "evaluateins"}[kind]
    scalars = {**single_values(config), PACKED: True}
    # Not a numeric dtype, so that one of Flower's own clients fails instead of taking the bytes for its model.
    arrays = ArrayRecord({"0": _as_array(np.frombuffer(packed, dtype="V1"))})
    return RecordDict({f"{prefix}.parameters": arrays, f"{prefix}.config": ConfigRecord(scalars)})


def read_instruction(kind: str, content: RecordDict) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """Return the arrays and config of a message, as a ``NumPyClient`` would get them.

    A message of one of Flower's own strategies, without `PartialUpdates`, contains a whole model; `as_asked`
    answers it.

    Raises
    ------
    UpdateError
        If the message has the records of neither kind of strategy.
    """
    if _is_stock(content):
        (record,), (sent,) = content.array_records.values(), content.config_records.values()
        arrays = [np.asarray(array.numpy()) for array in record.values()]
        return arrays, {**sent, NAMES: list(record)}
    prefix = {"train": "fitins", "evaluate": "evaluateins"}[kind]
    try:
        packed = content.array_records[f"{prefix}.parameters"]
        config = dict(content.config_records[f"{prefix}.config"])
    except KeyError as error:
        raise UpdateError(
            f"message has no record {error}: wrap the server's strategy in PartialUpdates"
        ) from None
    # For an empty list of arrays Flower's legacy strategies send one array without data.
    return [bytes_to_ndarray(array.data) for array in packed.values() if array.data], config


def _is_stock(content: RecordDict) -> bool:
    """Return whether a message has one record of arrays and one of settings, as Flower's own strategies send."""
    own = any(name.startswith(("fitins.", "evaluateins.")) for name in content)
    return not own and len(content.array_records) == len(content.config_records) == 1


def as_asked(asked: RecordDict, reply: RecordDict) -> RecordDict:
    """Return a reply in the form that the asking strategy reads: unchanged, or converted for one of Flower's own.

    Raises
    ------
    UpdateError
        If the reply is a failure, for which those strategies have no record; Flower turns it into an error.
    """
    if not _is_stock(asked):
        return reply
    prefix = "fitres" if "fitres.metrics" in reply else "evaluateres"
    metrics = reply.config_records[f"{prefix}.metrics"]
    if ERROR in metrics:
        raise UpdateError(str(metrics[ERROR]))
    count = reply.metric_records[f"{prefix}.num_examples"]["num_examples"]
    numbers = {**believed_metrics(metrics), EXAMPLES: count}
    if prefix == "evaluateres":
        loss = reply.metric_records[f"{prefix}.loss"]["loss"]
        return RecordDict({"metrics": MetricRecord({"loss": loss, **numbers})})
    (key,) = asked.array_records
    arrays = reply.array_records["fitres.parameters"].values()
    whole = {
        name: Array(bytes_to_ndarray(array.data))
        for name, array in zip(asked.array_records[key], arrays, strict=True)
    }
    return RecordDict({key: ArrayRecord(whole), "metrics": MetricRecord(numbers)})


def train_reply(
    arrays: list[NDArray[Any]], num_examples: int, metrics: Mapping[str, Any]
) -> RecordDict:
    """Return the content of a reply to a training instruction; log metrics that the server will leave out."""
    warn_of_left_out(metrics)
    packed = {str(index): _as_array(array) for index, array in enumerate(arrays)}
    return RecordDict(
        {
            "fitres.parameters": ArrayRecord(packed),
            "fitres.num_examples": MetricRecord({"num_examples": num_examples}),
            "fitres.metrics": ConfigRecord(dict(metrics)),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
    )


def evaluate_reply(loss: float, num_examples: int, metrics: Mapping[str, Any]) -> RecordDict:
    """Return the content of a reply to an evaluation instruction; log metrics that the server will leave out."""
    warn_of_left_out(metrics)
    return RecordDict(
        {
            "evaluateres.loss": MetricRecord({"loss": loss}),
            "evaluateres.num_examples": MetricRecord({"num_examples": num_examples}),
            "evaluateres.metrics": ConfigRecord(dict(metrics)),
            "evaluateres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
    )


def answer_in(message: Message) -> TrainReply:
    """Return a client's answer to a task other than training; raise UpdateError if the client failed."""
    if message.has_error():
        raise UpdateError(message.error.reason or "no reason given")
    return read_train_reply(message.content)


def read_train_reply(content: RecordDict) -> TrainReply:
    """Return the reply in ``content``.

    Raises
    ------
    StaleModelError
        If the client needs the whole model.
    DivergedError
        If its loss, or a tensor that it trained, is not finite.
    UpdateError
        If it is no reply, or reports another failure.
    """
    try:
        # Read the view once: each access makes a new one.
        configs = content.config_records
        status = configs["fitres.status"]
        metrics = _all_metrics(content, configs["fitres.metrics"])
        arrays = content.array_records["fitres.parameters"]
        num_examples = content.metric_records["fitres.num_examples"]["num_examples"]
    except KeyError as error:
        raise UpdateError(f"reply has no record {error}: is the client an ElasticClient?") from None
    _check_errors(metrics, "train")
    check_status(status)
    if list(arrays) != ["0"]:
        raise UpdateError(f"reply holds {len(arrays)} arrays, expected one packed buffer")
    if not isinstance(num_examples, int):
        raise UpdateError(f"num_examples must be an integer, got {num_examples!r}")
    return TrainReply(
        packed=_read_buffer(arrays["0"]),
        num_examples=num_examples,
        metrics=believed_metrics(metrics),
        left_out=left_out_of(metrics),
        importance=metrics.get(IMPORTANCE),
        may_train=metrics.get(MAY_TRAIN),
        have=_version(metrics),
        forget=metrics.get(FORGET),
    )


def read_evaluate_reply(content: RecordDict, max_examples: int) -> EvaluateReply:
    """Return the reply in ``content``.

    Raises
    ------
    StaleModelError
        If the client needs the whole model.
    UpdateError
        If the reply is invalid or cannot be averaged.
    """
    try:
        status = content.config_records["evaluateres.status"]
        metrics = _all_metrics(content, content.config_records["evaluateres.metrics"])
        loss = content.metric_records["evaluateres.loss"]["loss"]
        num_examples = content.metric_records["evaluateres.num_examples"]["num_examples"]
    except KeyError as error:
        raise UpdateError(f"reply has no record {error}: is the client an ElasticClient?") from None
    _check_errors(metrics, "evaluate")
    check_status(status)
    examples = checked_weight(num_examples, "num_examples", max_examples)
    if not isinstance(loss, (int, float)) or not math.isfinite(loss):
        raise UpdateError(f"loss must be finite, got {loss!r}")
    return EvaluateReply(
        float(loss),
        examples,
        believed_metrics(metrics),
        _version(metrics),
        left_out_of(metrics),
    )


def weight_of(reply: TrainReply | EvaluateReply, weight_key: str, most: int) -> int:
    """Return the weight of a reply: the metric by which the strategy weights, or else the number of examples.

    Raises
    ------
    UpdateError
        If it is no whole number from 1 to ``most``.
    """
    # A reply has the number of examples outside its metrics.
    given = {**reply.metrics, EXAMPLES: reply.num_examples}
    return checked_weight(given.get(weight_key, reply.num_examples), weight_key, most)


def checked_weight(said: object, weight_key: str, most: int) -> int:
    """Return a weight that a client claims; UpdateError unless it is a whole number from 1 to ``most``.

    >>> checked_weight(8.0, "num-examples", 100)
    8
    """
    # Not 0, because Flower's strategies divide by the sum of the weights; 8.0 counts as 8, as it does there.
    weight = whole(said)
    if weight is None or not 0 < weight <= most:
        raise UpdateError(f"{weight_key} is {said!r}, expected a whole number from 1 to {most}")
    return weight


def failure(error: Exception) -> dict[str, Any]:
    """Return the metrics by which a client reports a failure.

    >>> failure(KeyError("speed"))[ERROR]
    "KeyError: 'speed'"
    """
    kinds = {STALE: StaleModelError, DIVERGED: DivergedError}
    marks = {key: True for key, kind in kinds.items() if isinstance(error, kind)}
    said = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
    return {ERROR: said, **marks}


def _all_metrics(content: RecordDict, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's metrics, together with those that mods have put into metric records."""
    added = {
        str(name): value
        for record in content.metric_records.values()
        for name, value in record.items()
        if name not in _FIXED
    }
    return {**added, **own}


def _check_errors(metrics: Mapping[str, Any], what: str) -> None:
    if STALE in metrics:
        raise StaleModelError(f"client needs the whole model: {str(metrics.get(ERROR))[:500]}")
    if ERROR in metrics:
        kind = DivergedError if DIVERGED in metrics else UpdateError
        raise kind(f"client could not {what}: {str(metrics[ERROR])[:500]}")


def _version(metrics: Mapping[str, Any]) -> int | None:
    version = metrics.get(HAVE)
    return version if isinstance(version, int) and not isinstance(version, bool) else None


def check_status(status: Mapping[str, Any]) -> None:
    """Raise UpdateError if a client reports a failure in its status."""
    if status.get("code") != 0:
        raise UpdateError(f"client reports failure: {str(status.get('message'))[:500]}")


def _as_array(array: NDArray[Any]) -> Array:
    return Array(dtype="", shape=(), stype=_NUMPY, data=ndarray_to_bytes(array))


def _read_buffer(array: Array) -> memoryview:
    plain = _plain_bytes(array.data)
    if plain is not None:
        return plain
    try:
        values = bytes_to_ndarray(array.data)
    # The bytes come from a client; numpy raises a different error for each way in which they can be wrong.
    except Exception as error:
        raise UpdateError(f"packed buffer cannot be read: {error}") from None
    if not isinstance(values, np.ndarray):
        raise UpdateError("expected one packed buffer of bytes, got an archive of arrays")
    if values.dtype != np.uint8 or values.ndim != 1:
        raise UpdateError(
            f"expected one packed buffer of bytes, got {values.dtype} of shape {values.shape}"
        )
    return values.data


def _plain_bytes(data: bytes) -> memoryview | None:
    """Return a view of the bytes in an array that numpy wrote for a vector of bytes; None for anything else.

    numpy's own reader copies the bytes, which takes a sixth of the time of merging an update.
    """
    stream = BytesIO(data)
    try:
        if read_magic(stream) != (1, 0):
            return None
        shape, _, dtype = read_array_header_1_0(stream)
    # Whatever numpy raises here, `_read_buffer` then finds out what is wrong.
    except Exception:
        return None
    numbers = memoryview(data)[stream.tell() :]
    return numbers if dtype == np.uint8 and shape == (len(numbers),) else None
