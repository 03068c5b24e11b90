"""Flower's own clients, which know nothing of packed models, in a fleet that uses them: they exchange whole models.

Such a client is recognised by its answers. One that cannot read the packed model is sent the plain one in the same
round, in the records of both kinds of client, and from then on in those of its own kind.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.metrics import believed_metrics, left_out_of
from fl_elastic.flower.records import LOSS, EvaluateReply
from fl_elastic.flower.records import read_evaluate_reply as read_own_evaluate_reply
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.checks import Limits, check_update
from fl_elastic.update.manifest import Role, Weights

_LOG = logging.getLogger("fl_elastic")
_PREFIXES = {"train": "fitins", "evaluate": "evaluateins"}
# Names that Flower's examples use for loss and accuracy.
_SHORT = {"loss": "loss", "acc": "accuracy", "accuracy": "accuracy"}
_LISTS, _RECORDS, _EITHER = "a NumPyClient", "a ClientApp", "a client of Flower"


class StockClients:
    """Knows which nodes run Flower's own clients, and makes and reads messages for them.

    Attributes
    ----------
    kinds : dict of int to str
        Kind of each such node, as far as it is known.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self._own: set[int] = set()

    def __contains__(self, node: object) -> bool:
        return node in self.kinds

    def supposed(self, node: int) -> bool:
        """Assume that a node that failed on the packed model is a stock client; return False if it is not."""
        if node in self._own or node in self.kinds:
            return False
        self.kinds[node] = _EITHER
        return True

    def refuted(self, node: int) -> None:
        """Forget an assumption about a node."""
        if self.kinds.get(node) == _EITHER:
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
            A node with such a client.
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
            arrays = {name: Array(np.asarray(array)) for name, array in weights.items()}
            content |= {keys[0]: ArrayRecord(arrays), keys[1]: config}
        if self.kinds[node] != _RECORDS:
            prefix = _PREFIXES[kind]
            scalars: dict[str, Any] = {
                key: value for key, value in config.items() if not isinstance(value, list)
            }
            if "server-round" in scalars:
                scalars["server_round"] = scalars["server-round"]
            listed = {
                str(place): Array("", (), "numpy.ndarray", ndarray_to_bytes(np.asarray(array)))
                for place, array in enumerate(weights.values())
            }
            content[f"{prefix}.parameters"] = ArrayRecord(listed)
            content[f"{prefix}.config"] = ConfigRecord(scalars)
        return RecordDict(content)

    def update(
        self,
        message: Message,
        weights: Weights,
        manifest: Manifest,
        version: int,
        steps: Sequence[int],
        limits: Limits,
    ) -> tuple[PartialUpdate, dict[str, Any], int]:
        """Return a reply's model as an update of all tensors, its metrics, and its size in bytes.

        Parameters
        ----------
        message : Message
            The reply.
        weights, manifest, version
            The model that this round started from.
        steps : sequence of int
            Steps of the other clients; such a client reports none, and is assumed to take the median.
        limits : Limits
            Bounds of what is believed.

        Raises
        ------
        UpdateError
            If it is no reply, of another model, or of an earlier round, whose model is not kept.
        """
        node, content = message.metadata.src_node_id, message.content
        arrays, examples, metrics = self._read(node, content)
        if message.metadata.group_id != group_of(version):
            raise UpdateError(
                f"it is {self.kinds[node]}, whose model of an earlier round cannot be merged"
            )
        names = list(manifest.names)
        if len(arrays) != len(names):
            raise UpdateError(f"got {len(arrays)} arrays, the model has {len(names)} tensors")
        usual = max(1, int(statistics.median(steps))) if steps else 1
        deltas: dict[str, NDArray[Any]] = {}
        for name, array in zip(names, arrays, strict=True):
            if manifest.role(name) is Role.COUNTER:
                continue
            if array.shape != manifest.shape(name) or array.dtype.kind != "f":
                raise UpdateError(
                    f"tensor {name!r} is {array.dtype} of shape {array.shape}, the model has {manifest.shape(name)}"
                )
            delta = np.asarray(array, np.float32) - np.asarray(weights[name], np.float32)
            # A client that trains a part of the model leaves the rest unchanged, bit by bit.
            if delta.any() or not np.isfinite(delta).all():
                deltas[name] = delta
        update = PartialUpdate(deltas, dict.fromkeys(deltas, usual), examples, version)
        check_update(update, manifest, limits)
        return update, metrics, sum(array.nbytes for array in arrays)

    def _read(
        self, node: int, content: RecordDict
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Return arrays, examples and metrics of a reply, and note the client's kind."""
        try:
            if "fitres.parameters" in content:
                listed = content.array_records["fitres.parameters"]
                arrays = [bytes_to_ndarray(array.data) for array in listed.values()]
                examples = content.metric_records["fitres.num_examples"]["num_examples"]
                metrics = dict(content.config_records["fitres.metrics"])
                self.kinds[node] = _LISTS
            else:
                (record,) = content.array_records.values()
                arrays = [array.numpy() for array in record.values()]
                (sent,) = content.metric_records.values()
                metrics = {str(name): value for name, value in sent.items()}
                examples = _examples(metrics)
                self.kinds[node] = _RECORDS
        # The bytes come from a client; numpy and Flower raise a different error for each way they can be wrong.
        except Exception as error:
            raise UpdateError(
                f"a whole model cannot be read: {type(error).__name__}: {error}"
            ) from None
        if not isinstance(examples, int) or isinstance(examples, bool):
            raise UpdateError(f"num-examples must be an integer, got {examples!r}")
        left = left_out_of(metrics)
        if left:
            _LOG.warning("node %s: metrics left out: %s", node, left)
        return [np.asarray(array) for array in arrays], examples, _called_alike(metrics)


def group_of(version: int) -> str:
    """Return the group id of a message, which Flower copies to its reply: the version of the model in it."""
    return f"fl_elastic-{version}"


def evaluation_of(content: RecordDict, max_examples: int) -> EvaluateReply:
    """Return the reply of any kind of client to an evaluation message.

    Raises
    ------
    UpdateError
        If the reply is invalid or cannot be averaged.
    """
    if content.config_records or len(content.metric_records) != 1:
        return read_own_evaluate_reply(content, max_examples)
    (sent,) = content.metric_records.values()
    metrics = {str(name): value for name, value in sent.items()}
    examples = _examples(metrics)
    if not isinstance(examples, int) or not 0 < examples <= max_examples:
        raise UpdateError(f"num-examples is {examples!r}, expected 1 to {max_examples}")
    alike = _called_alike(metrics)
    short = {
        _SHORT[end]: value
        for name, value in alike.items()
        if (end := name.replace("_", "-").split("-")[-1]) in _SHORT
    }
    if "loss" not in short:
        raise UpdateError("its metrics have no finite loss")
    return EvaluateReply(
        float(short["loss"]), examples, {**alike, **short}, left_out=left_out_of(metrics)
    )


def _examples(metrics: Mapping[str, Any]) -> Any:
    return metrics.get("num-examples", metrics.get("num_examples"))


def _called_alike(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with the training loss under the library's name: ``train-loss`` instead of ``train_loss``."""
    found = {
        LOSS if name == LOSS.replace("-", "_") else name: value
        for name, value in believed_metrics(metrics).items()
    }
    return {n: v for n, v in found.items() if n not in ("num-examples", "num_examples")}
