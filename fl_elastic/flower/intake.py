"""Take the replies of a round in, one by one: read, check, merge, and keep only what is still needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_elastic.aggregation import PartialMean, SizeBounds
from fl_elastic.errors import StaleModelError, UpdateError
from fl_elastic.flower.dense import completed
from fl_elastic.flower.downlink import Downlink
from fl_elastic.flower.fleet import Fleet
from fl_elastic.flower.replies import one_line
from fl_elastic.flower.round_record import AcceptedReply, Rejection, RoundRecord
from fl_elastic.flower.streaming_grid import FORGET_AFTER
from fl_elastic.flower.terms import read_importance
from fl_elastic.flower.wire import TrainReply, read_train_reply
from fl_elastic.update import Manifest, PartialUpdate, decode
from fl_elastic.update.partial import Limits, check_variances

__all__ = ["Intake"]

_LOG = logging.getLogger("fl_elastic")
_LOSS = "train-loss"
# In the words of the errors by which clients refuse to go on.
_NOT_FINITE = re.compile(r"client could not train: .*(loss is|no longer finite)")


class Intake:
    """Merges replies to training messages; a reply that does not fit is logged and left out.

    Parameters
    ----------
    mean : PartialMean
        Merges updates.
    weights : dict of str to ndarray
        The model that was sent.
    fleet : Fleet
        Keeps the ledger.
    record : RoundRecord
        Filled in.
    downlink : Downlink
        Keeps what clients hold.
    sent_bytes : dict of int to int
        What each node was sent.
    limits : Limits
        What counts are believed.
    weight_key : str
        Metric by which the inner strategy weighs replies.
    complete : bool
        Whether each reply is to hold a whole model for the inner strategy.
    sizes : SizeBounds, optional
        Shortens changes that are too large.

    Attributes
    ----------
    usable, failed : list of Message
        Replies that were merged, with no more content than the inner strategy needs, and errors.
    metrics : list of RecordDict
        Metrics of each usable reply.
    importance : list of dict
        What clients said about importance, where anybody asked.
    losses : list of float
        Of training from the newest model.
    diverged : int
        Clients that could not train from it, as their loss was not finite.
    stale : dict of int to str
        Nodes that need the whole model, and why.
    """

    def __init__(
        self,
        mean: PartialMean,
        weights: Mapping[str, NDArray[Any]],
        fleet: Fleet,
        record: RoundRecord,
        *,
        downlink: Downlink,
        sent_bytes: Mapping[int, int],
        limits: Limits,
        weight_key: str,
        complete: bool,
        sizes: SizeBounds | None = None,
    ) -> None:
        self.usable: list[Message] = []
        self.failed: list[Message] = []
        self.metrics: list[RecordDict] = []
        self.importance: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.diverged = 0
        self.stale: dict[int, str] = {}
        self._sizes = sizes
        self._mean, self._weights, self._fleet, self._record = mean, weights, fleet, record
        self._downlink, self._sent_bytes, self._limits = downlink, sent_bytes, limits
        self._weight_key, self._complete = weight_key, complete

    @property
    def _manifest(self) -> Manifest:
        return self._mean.manifest

    def take(self, message: Message) -> None:
        """Merge one reply, or note why not."""
        if message.has_error():
            self.failed.append(message)
            node, reason = message.metadata.src_node_id, message.error.reason
            self.reject(node, f"client failed: {reason}")
            return
        arrived = message.content
        self._take(message)
        # Flower's records refer to each other in circles: else several replies would wait for the collector.
        for record in arrived.array_records.values():
            record.clear()

    def _take(self, message: Message) -> None:
        node = message.metadata.src_node_id
        try:
            reply = read_train_reply(message.content)
            update, staleness = self._decoded(reply)
            if not staleness:
                check_variances(update, self._weights)
            if self._sizes is not None:
                update, shortened = self._sizes.bounded(update, self._manifest, self._weights)
                if shortened:
                    self._record.shortened[node] = len(shortened)
            whole = self._whole_model(update)
            probabilities = self._fleet.trained(node, update)
            self._mean.add(update, probabilities=probabilities, staleness=staleness, checked=True)
        except StaleModelError as error:
            self.stale[node] = str(error)
            self._downlink.forget(node)
            return
        except UpdateError as error:
            self.diverged += _NOT_FINITE.search(str(error)) is not None
            self.reject(node, str(error))
            return
        self._record.accepted.append(
            AcceptedReply(
                node_id=node,
                steps=update.steps,
                num_examples=update.num_examples,
                uplink_bytes=len(reply.packed),
                metrics=reply.metrics,
                downlink_bytes=0 if staleness else self._sent_bytes.get(node, 0),
                staleness=staleness,
            )
        )
        self._downlink.holds(node, reply.have)
        if self._fleet.terms.wants_importance:
            self.importance.append(read_importance(reply.importance, self._fleet.groups))
        loss = reply.metrics.get(_LOSS)
        if loss is not None and not staleness:
            self.losses.append(float(loss))
        metrics = MetricRecord({**reply.metrics, self._weight_key: update.num_examples})
        self.metrics.append(RecordDict({"metrics": metrics}))
        # The reply's own arrays are not needed any more: memory stays that of one update.
        message.content = RecordDict({**whole, "metrics": metrics})
        self.usable.append(message)

    def reject(self, node: int, reason: str) -> None:
        """Log a reply that is left out, and enter it into the record."""
        reason, number = one_line(reason), self._record.server_round
        _LOG.warning("round %s: reply of node %s left out: %s", number, node, reason)
        self._record.rejected.append(Rejection(number, node, reason))
        self._downlink.forget(node)

    def _whole_model(self, update: PartialUpdate) -> dict[str, Any]:
        if not self._complete:
            return {}
        return {"arrays": completed(update, self._weights, self._manifest)}

    def _decoded(self, reply: TrainReply) -> tuple[PartialUpdate, int]:
        """Return the update and how many rounds it is late."""
        # The reply is read by nobody else: its numbers are merged where they are.
        update = decode(reply.packed, self._manifest, self._limits, in_place=True)
        server_round = self._record.server_round
        staleness = server_round - update.base_version
        latest = FORGET_AFTER if self._fleet.terms.late == "merge" else 0
        if not 0 <= staleness <= latest:
            raise UpdateError(
                f"update starts from version {update.base_version}, this round's is {server_round}"
            )
        if update.num_examples != reply.num_examples:
            raise UpdateError(
                f"header says {update.num_examples} examples, the reply {reply.num_examples}"
            )
        return update, staleness
