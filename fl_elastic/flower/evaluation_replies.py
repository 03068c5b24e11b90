"""Collect evaluations: read and check the replies, and bound the numbers that clients claim."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

from fl_elastic.claims import FEWEST
from fl_elastic.errors import UpdateError
from fl_elastic.flower.client_availability import inner_times
from fl_elastic.flower.downlink import Downlink, MessagePacker
from fl_elastic.flower.metrics import completed_metrics
from fl_elastic.flower.records import EXAMPLES, EvaluateReply
from fl_elastic.flower.round import in_fixed_order, one_line
from fl_elastic.flower.stock_clients import RAISED, StockClients, evaluation_of

_LOG = logging.getLogger("fl_elastic")
_ACCURACY = "accuracy"
# Limit on a client's number of examples, as a multiple of the largest number outside the top fifth of the clients.
_EXAMPLES = 2.0
# No number may lie further from the others' than this multiple of their size or range.
_BEYOND = 1000.0


def asked_again(
    replies: Iterable[Message], packer: MessagePacker, stock: StockClients
) -> list[Message]:
    """Return the replies, after sending a plain model to the nodes that failed on the packed one.

    Parameters
    ----------
    replies : iterable of Message
        Replies to one evaluation.
    packer : MessagePacker
        Sent the messages.
    stock : StockClients
        Knows which nodes run Flower's own clients; some may never have been asked to train.
    """
    kept: list[Message] = []
    failed: dict[int, Message] = {}
    for message in replies:
        node = message.metadata.src_node_id
        raised = message.has_error() and message.error.code == RAISED
        if raised and node in packer.sent_bytes and stock.supposed(node):
            failed[node] = message
        else:
            kept.append(message)
    for answer in packer.whole_again(failed):
        node = answer.metadata.src_node_id
        # If a node fails again, its first error is kept. Only its first answer to the plain model counts.
        first = failed.pop(node, None)
        if first is None:
            continue
        if answer.has_error():
            stock.refuted(node)
        kept.append(first if answer.has_error() else answer)
    return [*kept, *failed.values()]


def believed(
    replies: Iterable[Message], weight_key: str, max_examples: int, downlink: Downlink
) -> list[Message]:
    """Return the errors and the valid evaluations as the inner strategy reads them; log and leave out the others.

    Parameters
    ----------
    replies : iterable of Message
        Replies to one evaluation.
    weight_key : str
        Metric by which the inner strategy weights replies.
    max_examples : int
        Most examples of one client.
    downlink : Downlink
        Keeps which versions clients hold.
    """
    failed: list[Message] = []
    messages: dict[int, Message] = {}
    read: dict[int, EvaluateReply] = {}
    for message in in_fixed_order(replies):
        node = message.metadata.src_node_id
        if message.has_error():
            downlink.forget(node)
            failed.append(message)
            continue
        try:
            reply = evaluation_of(message.content, max_examples, weight_key)
        except UpdateError as error:
            downlink.forget(node)
            _leave_out(node, str(error))
            continue
        if node in read:
            _leave_out(node, "it has sent another one")
            continue
        downlink.holds(node, reply.have)
        if reply.left_out:
            _LOG.warning("evaluation by node %s: metrics left out: %s", node, reply.left_out)
        messages[node], read[node] = message, reply
    kept, doubted = believable(read)
    for node, reason in doubted.items():
        _leave_out(node, reason)
    for node, each in kept.items():
        if each.num_examples < read[node].num_examples:
            _LOG.info(
                "evaluation by node %s: %s examples count as %s, twice the largest number that most clients have",
                node, read[node].num_examples, each.num_examples,
            )  # fmt: skip
    said = [{**_numbers(each), weight_key: each.num_examples} for each in kept.values()]
    contents = [RecordDict({"metrics": MetricRecord(each)}) for each in said]
    for node, content in zip(kept, completed_metrics(contents, weight_key), strict=True):
        messages[node].content = content
    return [*failed, *(messages[node] for node in kept)]


def _numbers(reply: EvaluateReply) -> dict[str, Any]:
    """Return the metrics of an evaluation, with its loss if there is one."""
    return reply.metrics if reply.loss is None else {**reply.metrics, "loss": reply.loss}


def _leave_out(node: int, reason: str) -> None:
    _LOG.warning("evaluation by node %s left out: %s", node, one_line(reason))


def believable(
    replies: Mapping[int, EvaluateReply],
) -> tuple[dict[int, EvaluateReply], dict[int, str]]:
    """Return the plausible evaluations by node, with bounded counts, and the reason for each implausible one.

    An accuracy must be between 0 and 1, unless most accuracies are not. No number may be further from the others'
    than a thousand times their size or range. With one or two clients every evaluation counts as plausible.

    Parameters
    ----------
    replies : mapping of int to EvaluateReply
        Replies by node.

    Examples
    --------
    >>> honest = {n: EvaluateReply(0.7, 100, {"accuracy": 0.5}) for n in range(4)}
    >>> kept, left = believable({**honest, 7: EvaluateReply(0.7, 10**8, {"accuracy": 1.0})})
    >>> kept[7].num_examples, left
    (200, {})
    >>> believable({**honest, 7: EvaluateReply(0.7, 100, {"accuracy": -5.0})})[1]
    {7: 'accuracy is -5, which is not between 0 and 1 as the others are'}
    """
    if len(replies) < FEWEST:
        return dict(replies), {}
    left: dict[int, str] = {}
    numbers = {node: _numbers(reply) for node, reply in replies.items()}
    shares = [said[_ACCURACY] for said in numbers.values() if _ACCURACY in said]
    are_shares = 2 * sum(0 <= share <= 1 for share in shares) > len(shares)
    for node, said in numbers.items():
        if are_shares and not 0 <= said.get(_ACCURACY, 0.0) <= 1:
            left[node] = (
                f"{_ACCURACY} is {said[_ACCURACY]:.4g}, which is not between 0 and 1 as the others are"
            )
    for name in sorted({name for said in numbers.values() for name in said} - {EXAMPLES}):
        of = {node: float(said[name]) for node, said in numbers.items() if name in said}
        if len(of) < FEWEST:
            continue
        inner = inner_times(of.values())
        room = _BEYOND * max(inner[-1] - inner[0], abs(inner[0]), abs(inner[-1]), 1.0)
        for node, value in of.items():
            if not inner[0] - room <= value <= inner[-1] + room:
                left.setdefault(
                    node,
                    f"{name} is {value:.4g}, most clients report {inner[0]:.4g} to {inner[-1]:.4g}",
                )
    most = int(_EXAMPLES * inner_times([float(each.num_examples) for each in replies.values()])[-1])
    kept = {
        node: replace(reply, num_examples=min(reply.num_examples, most))
        for node, reply in replies.items()
        if node not in left
    }
    return kept, left
