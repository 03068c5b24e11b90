"""Read, check and merge the replies of a round one by one, and drop each one's arrays once it is merged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, MetricRecord, RecordDict

from fl_elastic.aggregation.change_clipper import ChangeClipper
from fl_elastic.claims import FEWEST, may_lie
from fl_elastic.errors import DivergedError, StaleModelError, UpdateError
from fl_elastic.flower.capabilities import read_importance
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.downlink import Downlink
from fl_elastic.flower.incremental_grid import FORGET_AFTER
from fl_elastic.flower.records import EXAMPLES, LOSS, TrainReply, read_train_reply, weight_of
from fl_elastic.flower.round import AcceptedReply, Rejection, Round, in_fixed_order, one_line
from fl_elastic.flower.stock_clients import RAISED
from fl_elastic.flower.wrapped_strategy import completed
from fl_elastic.update import PartialUpdate, decode
from fl_elastic.update.checks import Limits, check_variances

_LOG = logging.getLogger("fl_elastic")
# Flower's error code for a message that a mod refused.
_BY_MOD = 6


@dataclass(frozen=True)
class ReplyMerger:
    """Merges the replies to a round's training messages; an invalid reply is logged and left out.

    Attributes
    ----------
    round : Round
        The round, with the merged updates and its record.
    whole : bool
        Whether the inner strategy sees each reply, which must then hold a whole model.
    weight_key : str
        Metric by which the inner strategy weights replies.
    fleet : ClientRegistry
        Keeps the ledger.
    downlink : Downlink
        Keeps which versions clients hold.
    limits : Limits
        Bounds of the counts that are believed.
    sizes : ChangeClipper
        Shortens changes that are too large; not used if the inner strategy sees each reply.
    late : dict of int to Message
        The newest update of an earlier round by node. It is merged once all replies are in, and only if the node
        has no update of this round: a node has one vote per round, however many updates it held back.
    doubted : list of tuple
        Size, node and message of unusually large updates, which are merged once the sizes of the others are known.
        If more than a fifth of the clients, and more than two, are doubted, the smallest of these updates are
        merged at once.
    """

    round: Round
    whole: bool
    weight_key: str
    fleet: ClientRegistry
    downlink: Downlink
    limits: Limits
    sizes: ChangeClipper
    late: dict[int, tuple[int, Message]] = field(default_factory=dict)
    doubted: list[tuple[float, int, Message]] = field(default_factory=list)

    def take_all(self, replies: Iterable[Message]) -> None:
        """Merge all replies of a round, and send the model again to clients that could not use it.

        Replies are merged as they arrive; if they come together, in a fixed order.
        """
        together = self.whole or isinstance(replies, Sequence)
        for message in in_fixed_order(replies) if together else replies:
            self.take(message)
        self._send_again()
        while self.doubted:
            self._merge_doubted()
        for node, (_, message) in sorted(self.late.items()):
            if node in self._heard:
                self._superseded(node)
            else:
                arrived = message.content
                self._take(message)
                self._clear(arrived)

    def _send_again(self) -> None:
        """Send the whole model to clients that could not use its changes, and take in their replies."""
        stale, self.round.stale = self.round.stale, {}
        if not stale:
            return
        refused: dict[int, str] = {}
        for message in self.round.packer.whole_again(stale):
            node = message.metadata.src_node_id
            stale.pop(node, None)
            of_mod = message.has_error() and message.error.code == _BY_MOD
            if of_mod and self.downlink.stock.takes_one_record(node):
                refused[node] = f"client failed: {message.error.reason}"
            else:
                self.take(message)
        for message in self.round.packer.whole_again(refused):
            refused.pop(message.metadata.src_node_id, None)
            self.take(message)
        stale |= refused
        for node, reason in {**stale, **self.round.stale}.items():
            # The assumption that a node runs one of Flower's own clients stays if the node did not answer again.
            self.reject(node, reason)

    def take(self, message: Message) -> None:
        """Merge one reply, or record why it is not merged."""
        if message.has_error():
            node, reason = message.metadata.src_node_id, message.error.reason
            raised, stock = message.error.code == RAISED, self.downlink.stock
            if raised and node in self.round.packer.sent_bytes and stock.supposed(node):
                # It may be one of Flower's own clients, which take the model in another form.
                self.round.stale[node] = f"client failed: {reason}"
                _LOG.info("node %s did not take the packed model: it is sent a plain one", node)
                return
            stock.refuted(node)
            self.round.failed.append(message)
            self.reject(node, f"client failed: {reason}")
            return
        arrived = message.content
        if self._take(message, waits=True):
            self._clear(arrived)

    def _hold(self, times: float, node: int, message: Message, update: PartialUpdate) -> None:
        self.sizes.hear(update, self.round.mean.manifest)
        self.doubted.append((times, node, message))
        # With fewer than three clients there is no usual size.
        if len(self.doubted) > max(may_lie(len(self.round.packer.sent_bytes)), FEWEST - 1):
            self._merge_doubted()

    def _merge_doubted(self) -> None:
        smallest = min(self.doubted, key=lambda held: held[:2])
        self.doubted.remove(smallest)
        message = smallest[2]
        arrived = message.content
        self._take(message, heard=True)
        self._clear(arrived)

    @staticmethod
    def _clear(content: RecordDict) -> None:
        # Flower's records have reference cycles: without this, several replies would stay until garbage collection.
        for record in content.array_records.values():
            record.clear()

    @property
    def _heard(self) -> set[int]:
        return {reply.node_id for reply in self.round.record.accepted} | {
            node for _, node, _ in self.doubted
        }

    def _superseded(self, node: int) -> None:
        number, reason = self.round.record.server_round, "a newer update of it is merged"
        _LOG.info("round %s: late update of node %s left out: %s", number, node, reason)
        self.round.record.rejected.append(Rejection(number, node, reason))

    def _hold_late(self, node: int, staleness: int, message: Message) -> None:
        """Keep a late update until the end of the round; of several from one node only the newest."""
        known = self.late.get(node)
        if known is not None:
            self._superseded(node)
            if known[0] <= staleness:
                self._clear(message.content)
                return
            self._clear(known[1].content)
        self.late[node] = staleness, message

    def _take(self, message: Message, *, waits: bool = False, heard: bool = False) -> bool:
        """Merge one reply, or record why not; return whether its content is no longer needed.

        With ``waits`` a late or unusually large update is held back; ``heard`` means that its size was recorded
        when it was held back.
        """
        node = message.metadata.src_node_id
        try:
            update, staleness, reply = self._read(message)
            if staleness and waits:
                self._hold_late(node, staleness, message)
                return False
            if node in self._heard:
                raise UpdateError("an update of this node is merged already: one per round counts")
            if not staleness:
                check_variances(update, self.round.weights)
            if not self.whole:
                known = self.round.mean.manifest, self.round.weights
                times = self.sizes.doubted(update, *known) if waits else 0.0
                if times:
                    self._hold(times, node, message, update)
                    return False
                update, shortened = self.sizes.bounded(update, *known, heard=heard)
                if shortened:
                    self.round.record.shortened[node] = len(shortened)
            this = self.round
            arrays = completed(update, this.weights, this.mean.manifest) if self.whole else None
            probabilities = self.fleet.trained(node, update)
            self.round.mean.add(
                update, probabilities=probabilities, staleness=staleness, checked=True
            )
        except StaleModelError as error:
            self.round.stale[node] = str(error)
            self.downlink.forget(node)
            return True
        except UpdateError as error:
            self.round.diverged += isinstance(error, DivergedError)
            self.reject(node, str(error))
            return True
        self._accept(node, update, staleness, reply)
        # The user's aggregation function may read the number of examples, whatever the strategy weights by.
        own = {} if node in self.downlink.stock else {EXAMPLES: reply.num_examples}
        metrics = MetricRecord({**own, **reply.metrics, self.weight_key: update.num_examples})
        self.round.metrics.append(RecordDict({"metrics": metrics}))
        # Drop the reply's arrays, so that only one update is in memory at a time.
        whole = {} if arrays is None else {"arrays": arrays}
        message.content = RecordDict({**whole, "metrics": metrics})
        self.round.usable.append(message)
        return True

    def _accept(self, node: int, update: PartialUpdate, staleness: int, reply: TrainReply) -> None:
        """Record a merged update, and pass on the other claims in its reply."""
        this, config = self.round, self.fleet.config
        this.record.accepted.append(
            AcceptedReply(
                node_id=node,
                steps=update.steps,
                num_examples=update.num_examples,
                uplink_bytes=reply.size or len(reply.packed),
                metrics=reply.metrics,
                downlink_bytes=0 if staleness else this.packer.sent_bytes.get(node, 0),
                staleness=staleness,
            )
        )
        self.downlink.holds(node, reply.have)
        if reply.left_out:
            _LOG.warning(
                "round %s: node %s: metrics left out: %s",
                this.record.server_round,
                node,
                reply.left_out,
            )
        if config.plan == "server":
            this.importance.append(read_importance(reply.importance, self.fleet.groups))
        if config.forget:
            self.fleet.forget_requests.hear(node, reply.forget)
        if this.frozen_consensus is not None and not staleness:
            this.frozen_consensus.hear(reply.may_train)
        loss = reply.metrics.get(LOSS)
        if loss is not None and not staleness:
            this.losses.append(float(loss))

    def reject(self, node: int, reason: str) -> None:
        """Log a reply that is left out, and add it to the record."""
        reason, number = one_line(reason), self.round.record.server_round
        _LOG.warning("round %s: reply of node %s left out: %s", number, node, reason)
        self.round.record.rejected.append(Rejection(number, node, reason))
        self.downlink.forget(node)

    def _read(self, message: Message) -> tuple[PartialUpdate, int, TrainReply]:
        """Return an update, its staleness in rounds, and the client's reply."""
        node, stock = message.metadata.src_node_id, self.downlink.stock
        if node not in stock:
            reply = read_train_reply(message.content)
            stock.is_own(node)
            update, staleness = self._decoded(reply)
            weight = weight_of(reply, self.weight_key, self.limits.max_examples)
            return replace(update, num_examples=weight), staleness, reply
        steps = [max(each.steps.values(), default=1) for each in self.round.record.accepted]
        this = self.round
        update, metrics, size = stock.update(
            message, this.weights, this.mean.manifest, this.record.server_round, steps, self.limits,
            self.weight_key,
        )  # fmt: skip
        return update, 0, TrainReply(bytes(0), update.num_examples, metrics, size=size)

    def _decoded(self, reply: TrainReply) -> tuple[PartialUpdate, int]:
        """Return the update and its staleness in rounds."""
        # Nobody else reads the reply, so its numbers are merged in place.
        update = decode(
            reply.packed,
            self.round.mean.manifest,
            self.limits,
            in_place=True,
            memory=self.round.mean.memory,
        )
        server_round = self.round.record.server_round
        staleness = server_round - update.base_version
        latest = FORGET_AFTER if self.round.mean.options.late == "merge" else 0
        if not 0 <= staleness <= latest:
            raise UpdateError(
                f"update starts from version {update.base_version}, this round's is {server_round}"
            )
        if update.num_examples != reply.num_examples:
            raise UpdateError(
                f"header says {update.num_examples} examples, the reply {reply.num_examples}"
            )
        return update, staleness
