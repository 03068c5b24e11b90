"""Rounds without training: they solve for the head, choose places and cuts, or make the model forget examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from flwr.app import Message
from flwr.serverapp import Grid

from fl_elastic.flower.capabilities import read_importance
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.downlink import Downlink, MessagePacker
from fl_elastic.flower.fleet_cut import voters
from fl_elastic.flower.forgetting import dampened, why_not_kept
from fl_elastic.flower.incremental_grid import collecting
from fl_elastic.flower.records import LOSS
from fl_elastic.flower.round import AcceptedReply, RoundRecord, in_fixed_order
from fl_elastic.flower.round_zero import HeadCheckpoint, Solved, with_closed_form_head
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.forgetting import MeasureLoss, SumSquaredGradients
from fl_elastic.flower.tasks.rank_places import RankPlaces
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import RoundTask, read_answers
from fl_elastic.update import Manifest
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import WeightDict

_LOG = logging.getLogger("fl_elastic")
# Timeout in seconds for clients' ratings of cuts: enough to estimate unknown costs and take two full steps.
_PATIENCE_SECONDS = 300.0


class AuxiliaryRounds:
    """Runs the rounds in which clients are asked for something other than training.

    Parameters
    ----------
    fleet : ClientRegistry
        The clients, and the fleet's cut.
    downlink : Downlink
        Sends the model.
    limits : Limits
        Bounds of the counts that the server believes.
    solved : HeadCheckpoint
        Stores the model after each solve of the head.
    on_round : callable, optional
        Called with a record of each round.
    """

    def __init__(
        self,
        fleet: ClientRegistry,
        downlink: Downlink,
        limits: Limits,
        solved: HeadCheckpoint,
        on_round: Callable[[RoundRecord], None] | None,
    ) -> None:
        self._fleet = fleet
        self._downlink = downlink
        self._limits = limits
        self._solved = solved
        self._on_round = on_round

    def choose_places(
        self,
        messages: Iterable[Message],
        grid: Grid,
        record: RoundRecord,
        timeout: float,
    ) -> WeightDict:
        """Choose from samples of a few clients which places the head reads; return the model that ends there."""
        # Imported here: only runs whose head may read elsewhere need it.
        from fl_elastic.flower.round_zero_places import asked_of, with_chosen_places
        from fl_elastic.readout.best_places import EXAMPLES

        asked, read = asked_of(list(messages)), self._fleet.config.read
        examples = -(-EXAMPLES // max(len(asked), 1))
        task = RankPlaces(record.deadline, places=read, examples=examples)
        replies, packer = self._asked(asked, grid, task, record, timeout)
        weights = self._downlink.weights
        manifest = Manifest.of_arrays(weights)
        chosen = with_chosen_places(replies, weights, manifest, record, read, examples)
        self._close(record, packer)
        return chosen

    def solve(
        self,
        messages: Iterable[Message],
        grid: Grid,
        record: RoundRecord,
        timeout: float,
        *,
        forgets: bool = False,
    ) -> WeightDict:
        """Ask the nodes of these messages for sums; return the model with the head that is solved from them.

        If the model was just made to forget examples, the new head is taken even if its error is larger.
        """
        config, zero = self._fleet.config, record.server_round == 0
        task = SolveHead(
            record.deadline, cut=self._fleet.cut.group,
            # After a later round the model has no version number yet, so clients cannot keep it.
            keep=config.sends_changes and zero,
            clip=None if config.sums_privacy is None else config.sums_privacy.clip,
            noise=None if config.sums_privacy is None else config.sums_privacy.noise,
        )  # fmt: skip
        replies, packer = self._asked(messages, grid, task, record, timeout)
        weights = self._downlink.weights
        manifest = Manifest.of_arrays(weights)
        holds = self._downlink.holds if zero else lambda *_: None
        if config.sums_privacy is not None:
            from fl_elastic.flower.private_round_zero import with_private_head

            solved = with_private_head(
                replies, weights, manifest, record, holds, config.sums_privacy
            )
        else:
            solved = with_closed_form_head(replies, weights, manifest, self._limits, record, holds)
        record.head_features, record.head_penalty = solved.features, solved.penalty
        weights = solved.weights
        if solved.layer and config.solve_every:
            self._fleet.kept_head = solved.layer
            gone = self._solved.nodes - set(grid.get_node_ids())
            record.stepped_back = self._solved.take(
                solved, anyway=forgets,
                before=partial(self._solved_before, record, packer, timeout) if gone else None,
            )  # fmt: skip
            weights = self._solved.weights
            if record.stepped_back:
                self._fleet.slow_down()
                _LOG.warning(
                    "%s. The model of the previous solve is put back, and from now on clients multiply their "
                    "learning rates by %.3g", record.stepped_back, self._fleet.rate,
                )  # fmt: skip
        self._close(record, packer)
        return weights

    def _solved_before(self, record: RoundRecord, packer: MessagePacker, timeout: float) -> Solved:
        """Return the model of the previous solve, with a head solved for from sums of the present clients."""
        nodes = sorted(reply.node_id for reply in record.accepted)
        before = self._solved.weights
        task = SolveHead(record.deadline, cut=self._fleet.cut.group)
        with self._downlink.serving(before):
            replies, _ = self._asked(
                packer.blank(nodes), collecting(packer.grid), task, record, timeout
            )
        return with_closed_form_head(
            replies, before, Manifest.of_arrays(before), self._limits,
            RoundRecord(record.server_round, trains=False), lambda *_: None,
        )  # fmt: skip

    def solve_again(
        self,
        packer: MessagePacker,
        ended: RoundRecord,
        timeout: float,
        *,
        forgets: bool = False,
        last: bool = False,
    ) -> WeightDict | None:
        """Solve for the head after a round, from sums of the clients that answered in it.

        Returns the model for the next round: the one with the new head, or the model of the previous solve if
        training spoiled the features. Returns None if the next round uses the present model unchanged, because no
        solve is due or the new head was only for testing. A solve is always due after the ``last`` round of a run,
        and after the model was made to forget examples, because the new head is free of them.

        A client that cannot pass over all of its data within the round's deadline sends sums over a part of it.
        """
        config, number = self._fleet.config, ended.server_round
        # A client that could not train, perhaps for lack of memory, can still pass over its data, and nobody else
        # may have its classes. A client that did not answer is not waited for again.
        nodes = {reply.node_id for reply in ended.accepted if not reply.staleness}
        nodes |= {rejection.node_id for rejection in ended.rejected}
        last = last and config.solve_every > 0
        due = config.looks_after(number) or last or forgets
        if not due or not nodes:
            return None
        record = RoundRecord(number, deadline=ended.deadline, trains=False)
        # On a grid that records no times, because a pass for sums does not take as long as a training round.
        grid = collecting(packer.grid)
        solved = self.solve(packer.blank(sorted(nodes)), grid, record, timeout, forgets=forgets)
        if forgets and not record.accepted:
            self._fleet.forget_requests.not_yet(number)
        goes_on = config.solves_after(number) or last or forgets or record.stepped_back
        return solved if goes_on else None

    def forget(
        self,
        packer: MessagePacker,
        ended: RoundRecord,
        timeout: float,
        trained: Collection[str],
    ) -> WeightDict | None:
        """Return the model after forgetting the examples that clients of a round ask it to forget.

        Returns None if there is no such request, or if nothing could be forgotten. Tensors that were trained by
        steps are dampened. A head in closed form is not, because the caller solves for it again.

        All clients that answered are asked for squared gradients, because a weight that matters to the examples of
        one client may matter to all clients. A client that cannot pass over all of its data within the round's
        deadline sends sums over a part of it. Then the clients report their loss under the dampened model, which is
        kept only if most losses are not far larger than before.

        Parameters
        ----------
        trained : collection of str
            Names of the tensors that rounds may change.
        """
        fleet, number, weights = self._fleet, ended.server_round, self._downlink.weights
        nodes = sorted({reply.node_id for reply in ended.accepted if not reply.staleness})
        requests = fleet.forget_requests.open_of(nodes)
        fleet.forget_requests.round_passed(nodes, requests)
        if not requests:
            return None
        stepped = {
            n for n in trained if not fleet.kept_head or n.rpartition(".")[0] != fleet.kept_head
        }
        if not stepped:
            fleet.forget_requests.tried(requests, number)
            return weights
        record = RoundRecord(number, deadline=ended.deadline, trains=False)
        task = SumSquaredGradients(ended.deadline)
        grid = collecting(packer.grid)
        replies, again = self._asked(packer.blank(nodes), grid, task, record, timeout)
        alpha = None if fleet.config.forget is True else float(fleet.config.forget)
        new, came = dampened(
            replies, weights, Manifest.of_arrays(weights), self._limits, record, requests, alpha
        )
        new = {name: array if name in stepped else weights[name] for name, array in new.items()}
        kept = any(came.values())
        if kept:
            reason = self._why_not_kept(packer, new, ended, record, timeout)
            if reason:
                _LOG.warning("round %s: nothing is forgotten: %s", number, reason)
                kept, came, record.dampened = False, dict.fromkeys(came, 0), 0
        fleet.forget_requests.failed(
            {n: request for n, request in requests.items() if n not in came}
        )
        for node, examples in came.items():
            fleet.forget_requests.tried({node: requests[node]}, number if examples else 0)
        self._close(record, again)
        return new if kept else None

    def _why_not_kept(
        self,
        packer: MessagePacker,
        new: WeightDict,
        ended: RoundRecord,
        record: RoundRecord,
        timeout: float,
    ) -> str:
        """Ask a round's clients for the loss of a dampened model; return why it is not kept, empty if it is."""
        before = {
            each.node_id: float(each.metrics[LOSS])
            for each in ended.accepted
            if not each.staleness and LOSS in each.metrics
        }
        task, asked = MeasureLoss(ended.deadline), packer.blank(sorted(before))
        with self._downlink.serving(new):
            replies, _ = self._asked(asked, collecting(packer.grid), task, record, timeout)
        after: dict[int, float] = {}

        def failed(node: int, reason: str) -> None:
            # A client whose loss is not finite reports an error, so an error counts as an infinite loss.
            record.leave_out(node, reason, "loss of the dampened model")
            after[node] = math.inf

        for node, _, loss in read_answers(replies, lambda reply: reply.metrics.get(LOSS), failed):
            if loss is not None:
                after[node] = float(loss)
        return why_not_kept(before, after)

    def choose_cut(self, messages: Sequence[Message], grid: Grid, record: RoundRecord) -> bool:
        """Let the fastest clients of a round rate the possible cuts; return whether the fleet has a cut now.

        Clients rate them before the round, for the model that the round sends, with its closed-form head if there
        is one.

        Parameters
        ----------
        messages : sequence of Message
            The inner strategy's messages for the round; they are not changed.
        grid : Grid
            Sends the requests.
        record : RoundRecord
            Record of this exchange.
        """
        fleet = self._fleet
        task = fleet.task(RateCuts, cut="")
        nodes = [message.metadata.dst_node_id for message in messages]
        fastest = fleet.fastest(nodes, voters(len(nodes)))
        asked = [
            Message(message.content, message.metadata.dst_node_id, "train")
            for message in messages
            if message.metadata.dst_node_id in fastest
        ]
        replies, packer = self._asked(asked, collecting(grid), task, record, _PATIENCE_SECONDS)

        def failed(node: int, reason: str) -> None:
            record.leave_out(node, reason, "rating cuts")
            self._downlink.forget(node)

        shares = []
        for node, reply, share in read_answers(
            replies,
            lambda reply: read_importance(reply.importance, fleet.groups),
            failed,
            self._downlink.holds,
        ):
            shares.append(share)
            record.accepted.append(AcceptedReply(node, {}, 0, 0, reply.metrics))
        chosen = fleet.cut.decide([each for each in shares if each])
        if chosen:
            # With a cut a round takes only the time above it, so the known round times no longer hold.
            fleet.forget_capabilities()
        self._close(record, packer)
        return chosen

    def _asked(
        self,
        messages: Iterable[Message],
        grid: Grid,
        task: RoundTask,
        record: RoundRecord,
        timeout: float,
    ) -> tuple[list[Message], MessagePacker]:
        """Ask the nodes of these messages to do a task; return the replies, and the packer of the requests."""
        packer = MessagePacker("train", self._downlink, grid)
        # The served model may end at the places that its head reads, so every task names them.
        task = replace(task, read=self._fleet.read)
        packed = packer.packed(list(messages), lambda _: task)
        record.downlink_bytes = len(self._downlink.whole)
        replies = in_fixed_order(packer.grid.send_and_receive(packed, timeout=timeout))
        record.downlink_total_bytes += sum(packer.sent_bytes.values())
        return replies, packer

    def _close(self, record: RoundRecord, packer: MessagePacker) -> None:
        """Complete the record with what was sent to each client, and pass it to ``on_round``."""
        record.cut = self._fleet.cut.group
        record.accepted = [
            replace(reply, downlink_bytes=packer.sent_bytes.get(reply.node_id, 0))
            for reply in record.accepted
        ]
        if self._on_round is not None:
            self._on_round(record)
