"""Partial updates under any linear strategy of Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_elastic.aggregation import PartialMean, make_rule
from fl_elastic.errors import UpdateError
from fl_elastic.flower.inner import check_inner, metrics_aggregator, sees_each_client, weight_key
from fl_elastic.flower.replies import common_metrics, in_fixed_order, mean_metrics, one_line
from fl_elastic.flower.round_record import AcceptedReply, Rejection, RoundRecord
from fl_elastic.flower.wire import (
    TrainReply,
    instruction,
    read_evaluate_reply,
    read_train_reply,
)
from fl_elastic.update import (
    Limits,
    Manifest,
    PartialUpdate,
    Role,
    decode,
    encode_weights,
    make_codec,
)

__all__ = ["PartialUpdates"]

_LOG = logging.getLogger("fl_elastic")
_Weights = dict[str, NDArray[Any]]


class PartialUpdates(Strategy):
    """Lets clients send only what they trained, under an unchanged strategy of Flower.

    Sends the model as one packed buffer, checks and merges packed partial updates as they come, and hands the
    inner strategy what it expects: FedAvg, FedAvgM, FedAdam and the like get the merged model as one reply with the
    summed weight, which for a linear strategy is the same; a differential-privacy wrapper gets one complete
    reply per client, with the global value for every tensor that the client did not train. A reply that does
    not fit is logged and left out, and the round goes on.

    The inner strategy sees parameters only. Running statistics (BatchNorm) are averaged over the clients that
    updated them, untouched by a server optimiser, and not at all under differential privacy, whose noise they would
    escape. Integer buffers keep the server's value.

    Parameters
    ----------
    inner : Strategy
        From ``flwr.serverapp.strategy``.
    rule : str, optional
        Registered aggregation rule; ``contributors`` by default, always ``all`` under differential privacy.
    limits : Limits, optional
        Counts beyond which a reply is rejected.
    codec : str
        How the model is sent to the clients.
    on_round : callable, optional
        Called with the `RoundRecord` after each round's training.

    Raises
    ------
    RegistryError
        If the rule or codec is unknown or the inner strategy is not linear.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = PartialUpdates(FedAdam(eta=0.1), rule="contributors")
    """

    def __init__(
        self,
        inner: Strategy,
        *,
        rule: str | None = None,
        limits: Limits | None = None,
        codec: str = "fp32",
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self.inner = inner
        self.rule = check_inner(inner, rule)
        make_rule(self.rule)
        make_codec(codec)
        self.limits = limits or Limits()
        self.codec = codec
        self.on_round = on_round
        self._manifest: Manifest | None = None
        self._weights: _Weights = {}
        self._record = RoundRecord(0)

    def summary(self) -> None:
        """Log the settings of this wrapper and of the inner strategy."""
        _LOG.info("PartialUpdates: rule %s, codec %s, around:", self.rule, self.codec)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose clients and settings; pack the model for them."""
        self._remember(arrays)
        self._record = RoundRecord(server_round)
        # The inner strategy writes into the config it is given; the caller's stays as it was.
        messages = self.inner.configure_train(
            server_round=server_round,
            arrays=self._parameters(arrays),
            config=ConfigRecord(dict(config)),
            grid=grid,
        )
        return self._packed("train", list(messages), server_round)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose clients; pack the model for them."""
        self._remember(arrays)
        messages = self.inner.configure_evaluate(
            server_round=server_round,
            arrays=self._parameters(arrays),
            config=ConfigRecord(dict(config)),
            grid=grid,
        )
        return self._packed("evaluate", list(messages), server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the partial updates that fit; log and leave out the others."""
        manifest, each = self._known_manifest(), sees_each_client(self.inner)
        mean = PartialMean(manifest, self.rule, limits=self.limits)
        contents: list[RecordDict] = []
        usable: list[Message] = []
        failed: list[Message] = []
        for message in in_fixed_order(replies):
            if message.has_error():
                failed.append(message)
                self._reject(message, f"client failed: {message.error.reason}")
                continue
            try:
                reply = read_train_reply(message.content)
                update = self._decoded(reply, server_round)
                completed = self._completed(update) if each else {}
                mean.add(update)
            except UpdateError as error:
                self._reject(message, str(error))
                continue
            self._accept(message, reply, update)
            usable.append(message)
            metrics = MetricRecord({**reply.metrics, weight_key(self.inner): update.num_examples})
            contents.append(RecordDict({"metrics": metrics}))
            # The reply's own arrays are not needed any more: memory stays that of one update.
            message.content = RecordDict({**completed, "metrics": metrics})
        merged = mean.finish(self._weights)
        if each:
            for message, content in zip(usable, common_metrics(contents), strict=True):
                message.content["metrics"] = content["metrics"]
        elif usable:
            usable = [self._merged(usable[0], merged, common_metrics(contents))]
        aggregated: ArrayRecord | None = None
        merged_metrics: MetricRecord | None = None
        # Not every strategy of Flower stands a round without any reply.
        if usable or failed:
            aggregated, merged_metrics = self.inner.aggregate_train(
                server_round=server_round, replies=[*usable, *failed]
            )
        aggregate_metrics = metrics_aggregator(self.inner)
        if aggregate_metrics is not None and contents and merged_metrics is not None:
            merged_metrics = aggregate_metrics(common_metrics(contents), weight_key(self.inner))
        if self.on_round is not None:
            self.on_round(self._record)
        if aggregated is None:
            return None, merged_metrics
        return self._whole(aggregated, self._weights if each else merged), merged_metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Hand the inner strategy loss and metrics of the replies that fit."""
        translated: list[Message] = []
        usable: list[RecordDict] = []
        for message in in_fixed_order(replies):
            if message.has_error():
                translated.append(message)
                continue
            try:
                reply = read_evaluate_reply(message.content, self.limits.max_examples)
            except UpdateError as error:
                node = message.metadata.src_node_id
                _LOG.warning("evaluation by node %s left out: %s", node, one_line(str(error)))
                continue
            metrics = {
                **reply.metrics,
                "loss": reply.loss,
                weight_key(self.inner): reply.num_examples,
            }
            usable.append(RecordDict({"metrics": MetricRecord(metrics)}))
            message.content = usable[-1]
            translated.append(message)
        contents = iter(common_metrics(usable))
        for message in translated:
            if not message.has_error():
                message.content = next(contents)
        return self.inner.aggregate_evaluate(server_round=server_round, replies=translated)

    def _remember(self, arrays: ArrayRecord) -> None:
        self._weights = {name: array.numpy() for name, array in arrays.items()}
        self._manifest = Manifest.of_arrays(self._weights)

    def _known_manifest(self) -> Manifest:
        if self._manifest is None:
            raise UpdateError("aggregate_train was called before configure_train")
        return self._manifest

    def _parameters(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays that the inner strategy may see."""
        manifest = self._known_manifest()
        return ArrayRecord(
            {
                name: array if self._weights[name].ndim else _as_vector(self._weights[name])
                for name, array in arrays.items()
                if manifest.role(name) is Role.PARAMETER
            }
        )

    def _packed(self, kind: str, messages: list[Message], server_round: int) -> list[Message]:
        """Replace the content of each message; those that share content go on sharing it."""
        packed = encode_weights(
            self._weights, self._known_manifest(), version=server_round, codec=self.codec
        )
        contents: dict[int, RecordDict] = {}
        for message in messages:
            old = message.content
            if id(old) not in contents:
                config = next(iter(old.config_records.values()), ConfigRecord())
                contents[id(old)] = instruction(kind, packed, config)
            message.content = contents[id(old)]
        if kind == "train":
            self._record.downlink_bytes = len(packed)
        return messages

    def _decoded(self, reply: TrainReply, server_round: int) -> PartialUpdate:
        update = decode(reply.packed, self._known_manifest(), self.limits)
        if update.base_version != server_round:
            raise UpdateError(
                f"update starts from version {update.base_version}, this round's is {server_round}"
            )
        if update.num_examples != reply.num_examples:
            raise UpdateError(
                f"header says {update.num_examples} examples, the reply {reply.num_examples}"
            )
        return update

    def _accept(self, message: Message, reply: TrainReply, update: PartialUpdate) -> None:
        self._record.accepted.append(
            AcceptedReply(
                node_id=message.metadata.src_node_id,
                steps=update.steps,
                num_examples=update.num_examples,
                uplink_bytes=len(reply.packed),
                metrics=reply.metrics,
            )
        )

    def _reject(self, message: Message, reason: str) -> None:
        node, reason = message.metadata.src_node_id, one_line(reason)
        _LOG.warning(
            "round %s: reply of node %s left out: %s", self._record.server_round, node, reason
        )
        self._record.rejected.append(Rejection(self._record.server_round, node, reason))

    def _completed(self, update: PartialUpdate) -> dict[str, ArrayRecord]:
        """Return the whole model of one client, with the global value where it did not train."""
        manifest = self._known_manifest()
        arrays = {
            name: np.asarray(
                self._weights[name] + update.deltas.get(name, 0.0), manifest.array_dtype(name)
            )
            for name in manifest.names
            if manifest.role(name) is Role.PARAMETER
        }
        # Flower scales the change to the clipping norm, dividing by its own norm.
        if all(np.array_equal(array, self._weights[name]) for name, array in arrays.items()):
            raise UpdateError("it changes nothing, and a change of norm 0 cannot be clipped")
        return {"arrays": ArrayRecord({name: _as_vector(each) for name, each in arrays.items()})}

    def _merged(
        self, carrier: Message, merged: Mapping[str, NDArray[Any]], contents: list[RecordDict]
    ) -> Message:
        """Put the merged model, the summed weight and the mean metrics into one reply."""
        manifest = self._known_manifest()
        arrays = {
            name: _as_vector(merged[name])
            for name in manifest.names
            if manifest.role(name) is Role.PARAMETER
        }
        metrics = mean_metrics(contents, weight_key(self.inner))
        carrier.content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return carrier

    def _whole(self, aggregated: ArrayRecord, others: Mapping[str, NDArray[Any]]) -> ArrayRecord:
        """Join the inner strategy's parameters with statistics and counters, in the manifest's dtypes."""
        manifest = self._known_manifest()
        whole = {}
        for name in manifest.names:
            array = aggregated[name].numpy() if name in aggregated else others[name]
            typed = np.asarray(array, manifest.array_dtype(name))
            whole[name] = Array(typed.reshape(manifest.shape(name)))
        return ArrayRecord(whole)


def _as_vector(array: NDArray[Any]) -> Array:
    """Give a tensor without dimensions one: Flower's clipping and optimisers lose such tensors.

    numpy turns their sums into bare numbers, which in-place operations then miss.
    """
    return Array(np.atleast_1d(array))
