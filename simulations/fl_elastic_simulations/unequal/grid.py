"""A layer around Flower's grid that runs any app's messages on a fleet of unequal devices in simulated time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.incremental_grid import GridWrapper, IncrementalGrid
from fl_elastic_simulations.unequal.availability import when_enough
from fl_elastic_simulations.unequal.clock import (
    Clock,
    RoundCost,
    SimulatedClock,
    in_time,
    round_cost,
    round_seconds,
)
from fl_elastic_simulations.unequal.costs import CostOf, HostCost, charged, size_of
from fl_elastic_simulations.unequal.fleet import Client, Fleet
from fl_elastic_simulations.unequal.measuring import RECORD, Figures, Measured
from fl_elastic_simulations.unequal.node_partitions import KINDS, SilentNodesError, partitions_of
from fl_elastic_simulations.unequal.outcome import Answer, Outcome, answer
from fl_elastic_simulations.unequal.record import Row, save_rows

# Flower's error codes: of the host, of the app, and of a node that is unavailable.
_HOST_FAILED, _CLIENT_FAILED, _NODE_UNAVAILABLE = 0, 2, 5
_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.1
# A strategy that looks more often without sending anything waits for more devices.
_LOOKS = 5


@dataclass(frozen=True)
class _Sent:
    """A message on its way to a device, a copy of the one that was ``given``."""

    message: Message
    given: Message
    downlink_bytes: float
    node: int
    client: Client
    at: float
    there: bool


@dataclass(frozen=True)
class _Heard:
    """The server's answer to a message, a reply or an error in its place, with its row of the record."""

    reply: Message
    row: Row


class UnequalGrid(GridWrapper):
    """Wraps Flower's grid; messages take the time that they would take on a fleet of unequal devices.

    Each node plays the device of its partition number. The measurements of its app's `measuring_mod` are converted
    into simulated time. A device that is away is not asked; one that goes away or runs out of memory is answered
    for by an error. Replies come in simulated order; those after the strategy's ``timeout``, in simulated seconds,
    are dropped.

    Parameters
    ----------
    grid : Grid
        The wrapped grid.
    fleet : Fleet
        Fleet with one device for each of Flower's nodes.
    min_available_nodes : int
        As for the strategy: simulated time advances until this many devices are there. For a strategy that waits
        for more it advances too, once the strategy has looked a few times in vain.
    costs : callable, optional
        ``costs(message, reply)`` returns a `HostCost` from a reply's content. If given, nothing is measured, and
        apps are not told which device they play.
    clock : Clock, optional
        Clock to advance; by default one of its own.

    Attributes
    ----------
    began : float
        Time at which the messages of the last round were sent.
    patience : callable
        Returns the simulated seconds to wait for replies to training messages, besides the strategy's ``timeout``;
        None to wait for all. A `PartialUpdates` with a deadline sets it.

    Raises
    ------
    ScenarioError
        If the numbers of devices and of Flower's nodes differ, if a node's app has no `measuring_mod`, or if a host
        of the simulation is lost in a round, which says nothing about devices.

    Examples
    --------
    >>> def main(grid, context):
    ...     grid = UnequalGrid(grid, Fleet.load("fleet.toml"))
    ...     FedAvg().start(grid, initial_arrays, timeout=60)
    ...     grid.save("rows.csv")
    """

    # It waits in simulated time, so no other grid may wrap it to wait for replies.
    streams = True

    def __init__(
        self,
        grid: Grid,
        fleet: Fleet,
        *,
        min_available_nodes: int = 2,
        costs: CostOf | None = None,
        clock: Clock | None = None,
    ) -> None:
        devices = len(fleet.clients)
        if not 1 <= min_available_nodes <= devices:
            raise ScenarioError(
                f"min_available_nodes {min_available_nodes} is not from 1 to the {devices} devices of the fleet"
            )
        self.fleet = fleet
        self.clock: Clock = clock or SimulatedClock()
        self.began = 0.0
        self.patience: Callable[[], float | None] = _for_all
        self._away = itertools.count()
        # The types of messages that ask nodes for their partition.
        self._kinds = dict.fromkeys(KINDS)
        # Flower's older server also looks every few seconds, from a thread beside the one that waits.
        self._looks, self._thread = 0, threading.get_ident()
        self._costs = costs
        super().__init__(grid if getattr(grid, "streams", False) else IncrementalGrid(grid))
        self._least = min_available_nodes
        self._rows: list[Row] = []
        # By client, the time from which on its device is idle.
        self._free: dict[int, float] = {}
        self._pushed: dict[str, _Sent] = {}
        self._pulled: dict[str, Message] = {}
        self._heard: dict[str, _Heard] = {}

    @property
    def now(self) -> float:
        """Simulated seconds since the start."""
        return self.clock.now

    @property
    def rows(self) -> tuple[Row, ...]:
        """Record of each message, in the order in which the server heard of them."""
        return tuple(self._rows)

    def save(self, path: str | Path) -> Path:
        """Write the rows as a CSV file."""
        return save_rows(self._rows, path)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes whose devices are there, in the fleet's order, after waiting until there are enough."""
        try:
            clients = self._clients
        except SilentNodesError:
            # An app may have functions for types of its own alone: the first message says for which.
            if not self.fleet.always_there:
                raise
            return list(self._nodes)
        there, least = self.fleet.availabilities, self._least
        if threading.get_ident() == self._thread:
            self._looks = 0 if self._pushed or self._heard else self._looks + 1
        if self._looks > _LOOKS:
            least = min(sum(each.there(self.now) for each in there) + 1, len(there))
        self.clock.wait_until(when_enough(there, self.now, least))
        return [node for node, client in clients.items() if there[client.index].there(self.now)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send the messages; return the replies that arrive within ``timeout`` simulated seconds, in that order.

        A device first handles the messages that were pushed to it before.
        """
        while not self._hear_pushed():
            time.sleep(_POLL_SECONDS)
        self.began = began = self.now
        sent = [self._sent(message) for message in messages]
        if any(each.message.metadata.message_type == "train" for each in sent):
            limits = (timeout, self.patience())
            timeout = min((each for each in limits if each is not None), default=None)
        replies = self.inner.send_and_receive([each.message for each in sent if each.there])
        by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for each in sent:
            _name(each.given, each.message.metadata.message_id)
        heard = sorted(self._hear(sent, by_message), key=_turn)
        timely = [each for each in heard if in_time(each.row.arrival - began, timeout)]
        late = heard[len(timely) :]
        self._rows += [each.row for each in timely]
        self._rows += [replace(each.row, outcome=Outcome.LATE.value) for each in late]
        arrivals = (each.row.arrival - began for each in timely)
        seconds = round_seconds(arrivals, deadline=timeout, missing=bool(late))
        self.clock.wait_until(began + seconds)
        return [each.reply for each in timely]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages; return their ids."""
        sent = [self._sent(message) for message in messages]
        there = [each for each in sent if each.there]
        ids = iter(self.inner.push_messages([each.message for each in there]))
        names = [next(ids) if each.there else each.message.metadata.message_id for each in sent]
        for each, name in zip(sent, names, strict=True):
            _name(each.given, name)
        self._pushed |= dict(zip(names, sent, strict=True))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the reply that arrives first, once this is certain, and advance time to its arrival.

        So a custom loop that sends again to each client that answers is simulated as well: at each pull, all
        pending messages are handled on the host before the first reply is returned.
        """
        asked = set(message_ids)
        if not self._hear_pushed():
            return []
        coming = {name: each for name, each in self._heard.items() if name in asked}
        if not coming:
            return []
        name, first = min(coming.items(), key=lambda item: _turn(item[1]))
        del self._heard[name]
        self._rows.append(first.row)
        self.clock.wait_until(first.row.arrival)
        return [first.reply]

    @cached_property
    def _clients(self) -> dict[int, Client]:
        """The client of each node, in the fleet's order, by the partitions that the nodes report."""
        nodes = self._nodes
        partitions = partitions_of(self.inner, nodes, self._kinds)
        found = {place: node for node, place in partitions.items()}
        if sorted(found) != list(range(len(nodes))):
            raise ScenarioError(
                f"the nodes have partitions {sorted(partitions.values())}, and the fleet has devices "
                f"0 to {len(nodes) - 1}"
            )
        return {found[client.index]: client for client in self.fleet.clients}

    @cached_property
    def _nodes(self) -> list[int]:
        """Wait until all nodes are connected, since Flower starts the server first, and return them."""
        wanted, end = len(self.fleet.clients), time.monotonic() + _CONNECT_SECONDS
        while True:
            nodes = list(self.inner.get_node_ids())
            if len(nodes) == wanted:
                return nodes
            if len(nodes) > wanted or time.monotonic() > end:
                raise ScenarioError(
                    f"the fleet has {wanted} devices and Flower {len(nodes)} nodes: give the fleet's entries that "
                    f"count, or start Flower with --federation-config 'num-supernodes={wanted}'"
                )
            time.sleep(_POLL_SECONDS)

    def _sent(self, message: Message) -> _Sent:
        """Return a copy of a message with a request to measure; strategies share one content among messages."""
        self._looks = 0
        metadata = message.metadata
        self._kinds |= {metadata.message_type: None}
        client = self._clients.get(metadata.dst_node_id)
        if client is None:
            raise ScenarioError(
                f"a message is for node {metadata.dst_node_id}, which plays no device of the fleet: send to the "
                "nodes of get_node_ids()"
            )
        device, there = client.device, self.fleet.availabilities[client.index].there(self.now)
        size = float(size_of(message.content))
        content = RecordDict(dict(message.content))
        if self._costs is None:
            content[RECORD] = Figures(
                device=device.name,
                slowdown=device.slowdown,
                memory=float(client.memory_bytes or 0),
                bandwidth=device.uplink_bytes_per_second,
                downlink_seconds=size / device.downlink_bytes_per_second,
            ).as_record()
        asking = Message(
            content,
            metadata.dst_node_id,
            metadata.message_type,
            ttl=metadata.ttl,
            group_id=metadata.group_id,
        )
        if not there:
            _name(asking, f"away-{next(self._away)}")
        return _Sent(asking, message, size, metadata.dst_node_id, client, self.now, there)

    def _hear_pushed(self) -> bool:
        """Read replies to pushed messages; once there are none to wait for, determine when each arrives.

        Returns
        -------
        bool
            Whether the host has handled all pushed messages.
        """
        if not self._pushed:
            return True
        waiting = [name for name, sent in self._pushed.items() if sent.there]
        for reply in self.inner.pull_messages([n for n in waiting if n not in self._pulled]):
            self._pulled[reply.metadata.reply_to_message_id] = reply
        if any(name not in self._pulled for name in waiting):
            return False
        heard = self._hear(list(self._pushed.values()), self._pulled)
        self._heard |= dict(zip(self._pushed, heard, strict=True))
        self._pushed, self._pulled = {}, {}
        return True

    def _hear(self, sent: Sequence[_Sent], replies: Mapping[str, Message]) -> list[_Heard]:
        """Return the server's answers to messages, in their order, given the replies by message."""
        return [
            self._heard_of(each, replies.get(each.message.metadata.message_id)) for each in sent
        ]

    def _heard_of(self, sent: _Sent, reply: Message | None) -> _Heard:
        client, message = sent.client, sent.message
        if reply is not None and reply.has_error() and reply.error.code == _HOST_FAILED:
            # Ray's message has many lines.
            why = str(reply.error.reason).partition("\n")[0]
            raise ScenarioError(
                f"a message to client {client.index} was not handled, for no fault of its device's: {why}; "
                "run again, on hosts that stay"
            )
        cost = self._cost(sent, reply)
        on_device = round_cost(
            client.device,
            host_seconds=cost.seconds,
            uplink_bytes=cost.uplink_bytes,
            downlink_bytes=cost.downlink_bytes,
        )
        if client.memory_bytes is not None and cost.peak_bytes < 0:
            raise ScenarioError(
                "this host does not tell how much memory a message takes: give the fleet peak_bytes in its "
                "costs, or no memory_bytes"
            )
        found = answer(
            sent.at,
            on_device,
            self.fleet.availabilities[client.index],
            free=self._free.get(client.index, 0.0),
            peak_bytes=cost.peak_bytes,
            memory_bytes=client.memory_bytes,
        )
        self._free[client.index] = found.arrival
        lost = _lost(sent, found, cost)
        outcome = found.outcome
        if lost is None and (reply is None or reply.has_error()):
            outcome = Outcome.FAILED
            lost = None if reply is not None else Error(_CLIENT_FAILED, "no reply came")
        told = reply if lost is None else Message(lost, reply_to=message)
        assert told is not None
        return _Heard(told, _row(sent, found, outcome, cost, on_device))

    def _cost(self, sent: _Sent, reply: Message | None) -> HostCost:
        message, downlink = sent.message, sent.downlink_bytes
        if reply is None or reply.has_error():
            return HostCost(0.0, downlink, 0.0, 0.0)
        if self._costs is not None:
            return self._costs(message, reply)
        measured = Measured.of(reply)
        if measured is None:
            raise ScenarioError(
                f"node {message.metadata.dst_node_id} did not measure a message of type "
                f"{message.metadata.message_type!r}: give its app the mod, before any other, as in "
                "ClientApp(mods=[measuring_mod])"
            )
        uplink = float(size_of(reply.content))
        cost = HostCost(measured.seconds, downlink, uplink, measured.peak_bytes, measured.host)
        return charged(cost, self.fleet.costs, reply)


def _name(message: Message, identity: str) -> None:
    """Give a message its id, as Flower's own grid does, by which its reply is recognised."""
    message.metadata.__dict__["_message_id"] = identity


def _for_all() -> None:
    """Wait for all replies."""


def _turn(heard: _Heard) -> tuple[float, int]:
    """Return the sort key of a reply: its arrival, then the client for equal arrivals."""
    return heard.row.arrival, heard.row.client


def _lost(sent: _Sent, found: Answer, cost: HostCost) -> Error | None:
    """Return the error in place of a reply that will not arrive; None if it will."""
    device = f"client {sent.client.index} ({sent.client.device.name})"
    if found.outcome is Outcome.AWAY:
        when = "was away" if found.arrival <= sent.at else "went away"
        return Error(_NODE_UNAVAILABLE, f"{device} {when} at second {found.arrival:.3f}")
    if found.outcome is Outcome.OUT_OF_MEMORY:
        needed, limit = cost.peak_bytes / 1e6, (sent.client.memory_bytes or 0) / 1e6
        reason = f"{device} is out of memory: it takes {needed:.0f} MB, there are {limit:.0f} MB"
        return Error(_CLIENT_FAILED, reason)
    return None


def _row(sent: _Sent, found: Answer, outcome: Outcome, cost: HostCost, on_device: RoundCost) -> Row:
    return Row(
        server_round=_round_of(sent.message),
        message_type=sent.message.metadata.message_type,
        node=sent.node,
        client=sent.client.index,
        device=sent.client.device.name,
        outcome=outcome.value,
        sent=sent.at,
        arrival=found.arrival,
        downlink_seconds=on_device.downlink_seconds,
        compute_seconds=on_device.compute_seconds,
        uplink_seconds=on_device.uplink_seconds,
        downlink_bytes=cost.downlink_bytes,
        uplink_bytes=cost.uplink_bytes,
        peak_bytes=cost.peak_bytes,
        host=cost.host,
    )


def _round_of(message: Message) -> int:
    rounds = [record.get("server-round") for record in message.content.config_records.values()]
    return next((each for each in rounds if isinstance(each, int)), 0)
