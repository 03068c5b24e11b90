"""Flower's own clients in a fleet of elastic clients: they cannot read packed models and exchange whole ones.

The server recognises such a client by its answers. If a client fails on the packed model, it gets the plain one in
the same round, in the records of a NumPyClient and of a ClientApp together, and later only in those of its own
kind. If it fails on both records together, it gets only those of a ClientApp, because mods such as ``LocalDpMod``
take a single record of arrays.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.metrics import believed_metrics, left_out_of
from fl_elastic.flower.records import (
    EXAMPLES,
    LOSS,
    EvaluateReply,
    as_arrays,
    as_record,
    check_status,
    checked_weight,
    single_values,
    weight_of,
)
from fl_elastic.flower.records import read_evaluate_reply as read_own_evaluate_reply
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.checks import Limits, check_update
from fl_elastic.update.manifest import Role, Weights

RAISED = 2
"""Flower's code for an error that the client itself raised."""

_LOG = logging.getLogger("fl_elastic")
_PREFIXES = {"train": "fitins", "evaluate": "evaluateins"}
# Prefix of the records of a NumPyClient's evaluation.
_OWN = "evaluateres."
# Names that Flower's examples use for loss and accuracy.
_SHORT = {"loss": "loss", "acc": "accuracy", "accuracy": "accuracy"}
_LISTS, _RECORDS, _EITHER = "a NumPyClient", "a ClientApp", "a client of Flower"
_SUPPOSED = "a ClientApp, as it seems"


class StockClients:
    """Records which nodes run Flower's own clients, and makes and reads their messages.

    Attributes
    ----------
    kinds : dict of int to str
        Kind of each such node, known or assumed.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self._own: set[int] = set()
        self._told: set[str] = set()

    def __contains__(self, node: object) -> bool:
        return node in self.kinds

    def supposed(self, node: int) -> bool:
        """Assume that a node that failed on the packed model runs one of Flower's clients; False if it does not."""
        if node in self._own or node in self.kinds:
            return False
        self.kinds[node] = _EITHER
        return True

    def takes_one_record(self, node: int) -> bool:
        """Assume that a node failed because it got the records of both kinds; return False if it got only one."""
        if self.kinds.get(node) != _EITHER:
            return False
        self.kinds[node] = _SUPPOSED
        return True

    def refuted(self, node: int) -> None:
        """Drop the assumption about a node; a known kind stays."""
        if self.kinds.get(node) in (_EITHER, _SUPPOSED):
            del self.kinds[node]

    def is_own(self, node: int) -> None:
        """Note that a node runs a client of this library."""
        self._own.add(node)

    def instruction(
        self, node: int, kind: str, weights: Weights, config: ConfigRecord, keys: tuple[str, str]
    ) -> RecordDict:
        """Return the content of a message with the plain model and the inner strategy's settings.

        Parameters
        ----------
        node : int
            A node with one of Flower's clients.
        kind : {"train", "evaluate"}
            Kind of the message.
        weights : mapping of str to ndarray
            The model.
        config : ConfigRecord
            The inner strategy's settings.
        keys : tuple of str
            Names under which the inner strategy sends model and settings.
        """
        content: dict[str, Any] = {}
        if self.kinds[node] != _LISTS:
            content |= {keys[0]: as_record(weights), keys[1]: config}
        if self.kinds[node] not in (_RECORDS, _SUPPOSED):
            prefix = _PREFIXES[kind]
            listed = {
                str(place): Array("", (), "numpy.ndarray", ndarray_to_bytes(np.asarray(array)))
                for place, array in enumerate(weights.values())
            }
            content[f"{prefix}.parameters"] = ArrayRecord(listed)
            content[f"{prefix}.config"] = ConfigRecord(single_values(config))
        return RecordDict(content)

    def update(
        self,
        message: Message,
        weights: Weights,
        manifest: Manifest,
        version: int,
        steps: Sequence[int],
        limits: Limits,
        weight_key: str,
    ) -> tuple[PartialUpdate, dict[str, Any], int]:
        """Return a reply's model as an update of all tensors, its metrics, and its size in bytes.

        Parameters
        ----------
        message : Message
            The reply.
        weights, manifest, version
            The model that this round started from.
        steps : sequence of int
            Steps of the other clients; a client of Flower's reports none, and is assumed to take the median.
        limits : Limits
            Bounds of the counts that the server believes.
        weight_key : str
            Metric by which the inner strategy weights replies.

        Raises
        ------
        UpdateError
            If the message is not a reply, or its model is another one or of an earlier round.
        """
        node, content = message.metadata.src_node_id, message.content
        listed, said, metrics = self._read(node, content, weight_key)
        examples = checked_weight(said, weight_key, limits.max_examples)
        if message.metadata.group_id != group_of(version):
            raise UpdateError(
                f"it is {self.kinds[node]}, whose model of an earlier round cannot be merged"
            )
        arrays = _by_name(listed, manifest.names)
        usual = max(1, int(statistics.median(steps))) if steps else 1
        deltas: dict[str, NDArray[Any]] = {}
        for name, array in arrays.items():
            if manifest.role(name) is Role.COUNTER:
                self._warn_of_integers(name, array, weights[name], node)
                continue
            if array.shape != manifest.shape(name) or array.dtype.kind != "f":
                raise UpdateError(
                    f"tensor {name!r} is {array.dtype} of shape {array.shape}, the model has {manifest.shape(name)}"
                )
            # In double precision, because a change of a float64 tensor may be below the resolution of float32.
            with np.errstate(over="ignore"):
                # A tensor without a change counts like any other, as under Flower's strategies: it may have been
                # trained, with a gradient of zero.
                deltas[name] = np.subtract(array, weights[name], dtype=np.float64).astype(
                    np.float32
                )
        update = PartialUpdate(deltas, dict.fromkeys(deltas, usual), examples, version)
        check_update(update, manifest, limits)
        return update, metrics, sum(array.nbytes for array in arrays.values())

    def _warn_of_integers(
        self, name: str, array: NDArray[Any], before: NDArray[Any], node: int
    ) -> None:
        """Warn once for each integer tensor that a client changes, except scalars such as a norm's counter."""
        if not array.ndim or name in self._told or np.array_equal(array, before):
            return
        self._told.add(name)
        _LOG.warning(
            "node %s changes the integer tensor %r, which is not merged: the server's value stays. "
            "Send it as float32 to have it averaged", node, name,
        )  # fmt: skip

    def _read(
        self, node: int, content: RecordDict, weight_key: str
    ) -> tuple[dict[str, NDArray[Any]], object, dict[str, Any]]:
        """Return arrays, claimed examples and metrics of a reply, and note the client's kind."""
        try:
            if "fitres.parameters" in content:
                check_status(content.config_records["fitres.status"])
                listed = content.array_records["fitres.parameters"]
                arrays = {name: bytes_to_ndarray(array.data) for name, array in listed.items()}
                count = content.metric_records["fitres.num_examples"]["num_examples"]
                metrics = {EXAMPLES: count, **content.config_records["fitres.metrics"]}
                examples = metrics.get(weight_key, count)
                self.kinds[node] = _LISTS
            else:
                (record,) = content.array_records.values()
                arrays = as_arrays(record)
                (sent,) = content.metric_records.values()
                metrics = {str(name): value for name, value in sent.items()}
                examples = _examples(metrics, weight_key)
                self.kinds[node] = _RECORDS
        except UpdateError:
            raise
        # The bytes come from a client; numpy and Flower raise a different error for each way they can be wrong.
        except Exception as error:
            raise UpdateError(
                f"a whole model cannot be read: {type(error).__name__}: {error}"
            ) from None
        left = left_out_of(metrics)
        if left:
            _LOG.warning("node %s: metrics left out: %s", node, left)
        found = {name: np.asarray(array) for name, array in arrays.items()}
        return found, examples, _with_train_loss(metrics)


def _by_name(arrays: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a reply by the names of the model's tensors; a list of arrays is in their order."""
    if len(arrays) != len(names):
        raise UpdateError(f"got {len(arrays)} arrays, the model has {len(names)} tensors")
    if arrays.keys() == {*names}:
        return {name: arrays[name] for name in names}
    if list(arrays) != [str(place) for place in range(len(arrays))]:
        strange = next(name for name in arrays if name not in names)
        raise UpdateError(f"it names a tensor {strange[:80]!r}, which the model does not have")
    return dict(zip(names, arrays.values(), strict=True))


def group_of(version: int) -> str:
    """Return the group id of a message, which Flower copies to its reply: the version of the model in it."""
    return f"fl_elastic-{version}"


def evaluation_of(content: RecordDict, max_examples: int, weight_key: str) -> EvaluateReply:
    """Return the reply of any kind of client to an evaluation message.

    Parameters
    ----------
    content : RecordDict
        The content of the reply.
    max_examples : int
        Most examples of one client.
    weight_key : str
        Metric by which the inner strategy weights replies.

    Raises
    ------
    UpdateError
        If the reply is invalid or cannot be averaged.
    """
    if any(name.startswith(_OWN) for name in content) or len(content.metric_records) != 1:
        own = read_own_evaluate_reply(content, max_examples)
        weight = weight_of(own, weight_key, max_examples)
        return replace(
            own, num_examples=weight, metrics={**own.metrics, EXAMPLES: own.num_examples}
        )
    (sent,) = content.metric_records.values()
    metrics = {str(name): value for name, value in sent.items()}
    examples = checked_weight(_examples(metrics, weight_key), weight_key, max_examples)
    alike = _with_train_loss(metrics)
    named = {**_short_names(alike), **alike}
    lost = [name for name in metrics if _last_word(name) == "loss" and name not in alike]
    if lost and "loss" not in named:
        raise UpdateError(f"its metric {lost[0][:80]!r} is no finite number")
    return EvaluateReply(named.get("loss"), examples, named, left_out=left_out_of(metrics))


def _short_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return loss and accuracy, each if exactly one metric's name ends in that word.

    >>> _short_names({"eval_loss": 0.5, "eval_acc": 0.75, "top5-accuracy": 1.0})
    {'loss': 0.5}
    """
    ends = Counter(_SHORT.get(_last_word(name), "") for name in metrics)
    return {
        short: value
        for name, value in metrics.items()
        if ends[short := _SHORT.get(_last_word(name), "")] == 1 and short
    }


def _last_word(name: str) -> str:
    return name.replace("_", "-").split("-")[-1]


def _examples(metrics: Mapping[str, Any], weight_key: str) -> Any:
    """Return the weight of a client: under the strategy's name for it, or under Flower's."""
    named = (weight_key, EXAMPLES, "num_examples")
    return next((metrics[name] for name in named if name in metrics), None)


def _with_train_loss(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with the training loss under the library's name too: ``train-loss`` beside ``train_loss``.

    >>> _with_train_loss({"train_loss": 0.5, "num-examples": 8})
    {'train_loss': 0.5, 'num-examples': 8, 'train-loss': 0.5}
    """
    found = {n: value for n, value in believed_metrics(metrics).items() if n != "num_examples"}
    named = LOSS.replace("-", "_")
    return {**found, LOSS: found[named]} if named in found and LOSS not in found else found
