"""What the server sends in a round: the whole model, or the tensors that changed since the client's version."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.flower.incremental_grid import IncrementalGrid
from fl_elastic.flower.records import instruction
from fl_elastic.flower.stock_clients import StockClients, group_of
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.update import CODECS, Manifest
from fl_elastic.update.checks import MAX_VERSION
from fl_elastic.update.manifest import WeightDict, Weights
from fl_elastic.update.model_wire import encode_weights

_PATIENCE_SECONDS = 3600.0


@dataclass
class ChangeLog:
    """For each tensor of the global model, the version at which it last changed.

    Versions before the first recorded one are unknown. Record the initial model as a change from nothing to make it
    known.

    Attributes
    ----------
    versions : list of int
        The known versions, increasing.
    changed : dict of str to int
        For each tensor the version at which it last changed.

    Examples
    --------
    >>> first = {"a": np.zeros(2), "b": np.zeros(2)}
    >>> log = ChangeLog()
    >>> log.record(0, {}, first)
    >>> log.record(1, first, first | {"b": np.ones(2)})
    >>> log.since(0), log.since(1), log.since(2)
    (frozenset({'b'}), frozenset(), None)
    """

    versions: list[int] = field(default_factory=list)
    changed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {*self.versions}
        increasing = self.versions == sorted(known)
        bounded = all(0 <= version <= MAX_VERSION for version in known)
        if not increasing or not bounded or not known.issuperset(self.changed.values()):
            raise UpdateError("versions do not increase, or a tensor changed at an unknown one")

    def record(self, version: int, old: Weights, new: Weights) -> None:
        """Note which tensors differ, bit for bit, between the last recorded model and that of ``version``.

        A version that is not above all recorded ones belongs to another history (the server went back to a
        checkpoint): the log starts anew with it.
        """
        version = int(version)
        if self.versions and version <= self.versions[-1]:
            self.versions, self.changed = [], {}
        for name, array in new.items():
            if name not in old or not _same_bits(old[name], array):
                self.changed[name] = version
        self.versions.append(version)

    def amend(self, old: Weights, new: Weights) -> None:
        """Record a change of the model within the last recorded version; no client may hold the ``old`` model."""
        for name, array in new.items():
            if name not in old or not _same_bits(old[name], array):
                self.changed[name] = self.versions[-1]

    def copy(self) -> ChangeLog:
        """Return an independent copy of the log."""
        return ChangeLog([*self.versions], dict(self.changed))

    def since(self, version: int) -> frozenset[str] | None:
        """Return the tensors that changed after ``version``; None if the log does not know that version."""
        if version not in self.versions:
            return None
        return frozenset(name for name, at in self.changed.items() if at > version)


@dataclass(frozen=True)
class DownlinkState:
    """State of a `Downlink`: version and checksum of the model, the nodes' versions, and the change log."""

    version: int = -1
    checksum: int = 0
    held: dict[int, int] = field(default_factory=dict)
    changes: ChangeLog = field(default_factory=ChangeLog)


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return bool(np.array_equal(first, second))


def check_downlink_codec(codec: str) -> None:
    """Raise SettingError for a codec that cannot encode a model."""
    if not CODECS.make(codec).for_weights:
        raise SettingError(
            f"codec {codec!r} encodes updates only: send models as fp32, fp16 or bf16"
        )


class Downlink:
    """Packs the model for each client, and remembers which version each client says it holds.

    Version v is the model that round v trains from; after round v's training, evaluation already sees v + 1.

    Parameters
    ----------
    codec : str
        Registered codec that can encode weights.
    changes_only : bool
        Whether a client that holds an earlier version is sent only the tensors that changed since.

    Raises
    ------
    SettingError
        If the codec is unknown, or encodes updates only.
    """

    def __init__(self, codec: str, *, changes_only: bool = False) -> None:
        check_downlink_codec(codec)
        self.codec = codec
        self.changes_only = changes_only
        self.log = ChangeLog()
        self.stock = StockClients()
        self.held: dict[int, int] = {}
        # The model that is served.
        self.weights: WeightDict = {}
        self._manifest: Manifest | None = None
        self._version = -1
        self._checksum = 0
        self._packed: dict[int | None, bytes] = {}

    def serve(self, weights: WeightDict, manifest: Manifest, version: int) -> None:
        """Send this model from now on; it is not copied and must not be modified."""
        before, self.weights, self._manifest = self.weights, weights, manifest
        self._packed = {}
        known, self._version = self._version, version
        if not self.changes_only:
            return
        checksum, self._checksum = self._checksum, _checksum(weights)
        if version == known and checksum == self._checksum:
            return
        if version <= known:
            # The versions that clients hold are of another history.
            self.held = {}
        self.log.record(version, before, weights)

    def amend(self, weights: WeightDict) -> None:
        """Send this model under the same version from now on; no client may have kept the replaced one."""
        before, self.weights, self._packed = self.weights, weights, {}
        if self.changes_only:
            self._checksum = _checksum(weights)
            self.log.amend(before, weights)

    @contextmanager
    def serving(self, weights: WeightDict) -> Iterator[None]:
        """Send this model under the same version for as long as the block lasts."""
        served = self.weights
        self.amend(weights)
        try:
            yield
        finally:
            self.amend(served)

    @property
    def version(self) -> int:
        """Version of the model that is served."""
        return self._version

    @property
    def whole(self) -> bytes:
        """The whole model, packed."""
        return self._message(None)

    def for_node(self, node: int) -> bytes:
        """Return what to send to a client; clients that hold the same version get the same object."""
        whole = self.whole
        since = self.held.get(node)
        if since is None or self.log.since(since) is None:
            return whole
        changed = self._message(since)
        return changed if len(changed) < len(whole) else whole

    def holds(self, node: int, version: int | None) -> None:
        """Note which version a client says it holds; None for none."""
        if self.changes_only and version is not None and 0 <= version <= self._version:
            self.held[node] = version
        else:
            self.forget(node)

    def forget(self, node: int) -> None:
        """Send the whole model to this node next time."""
        self.held.pop(node, None)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the model that is served."""
        assert self._manifest is not None
        return self._manifest

    def _message(self, since: int | None) -> bytes:
        if since not in self._packed:
            self._packed[since] = encode_weights(
                self.weights, self.manifest, version=self._version, codec=self.codec,
                since=since, names=None if since is None else self.log.since(since),
            )  # fmt: skip
        return self._packed[since]

    def to_state(self) -> DownlinkState:
        """Return the state to be stored; empty if models are always sent whole."""
        if not self.changes_only:
            return DownlinkState()
        return DownlinkState(self._version, self._checksum, dict(self.held), self.log.copy())

    def restore(self, state: DownlinkState) -> None:
        """Restore what `to_state` returned."""
        self.log, self.held = state.changes.copy(), dict(state.held)
        self._version, self._checksum = state.version, state.checksum
        self.weights, self._packed = {}, {}


def _checksum(weights: Weights) -> int:
    checksum = 0
    for name, array in weights.items():
        described = f"{name}/{array.dtype}/{array.shape}".encode()
        # A zero-dimensional array has no buffer to view as bytes.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(flat.data, zlib.crc32(described, checksum))
    return checksum


class MessagePacker:
    """Puts the packed model into the messages that the inner strategy made.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        Kind of the messages.
    downlink : Downlink
        Packs the model.
    grid : Grid
        Sends the messages of `whole_again`.

    Attributes
    ----------
    sent_bytes : dict of int to int
        Bytes sent to each node.
    """

    def __init__(self, kind: str, downlink: Downlink, grid: Grid) -> None:
        self.sent_bytes: dict[int, int] = {}
        self._kind = kind
        self._downlink = downlink
        self.grid = grid
        self._configs: dict[int, ConfigRecord] = {}
        self._bare: dict[int, ConfigRecord] = {}
        self._contents: dict[tuple[int | str, int], RecordDict] = {}
        self._keys = "arrays", "config"

    def packed(
        self, messages: list[Message], task_for: Callable[[int], RoundTask]
    ) -> list[Message]:
        """Replace the content of each message; nodes with the same task share one content.

        Messages to Flower's own clients are dropped unless the task is one that these clients know.
        """
        stock = self._downlink.stock
        messages = [
            each
            for each in messages
            if (node := each.metadata.dst_node_id) not in stock or task_for(node).known_to_flower
        ]
        configs: dict[tuple[int, RoundTask], ConfigRecord] = {}
        bare: dict[int, ConfigRecord] = {}
        olds = [message.content for message in messages]
        for message, old in zip(messages, olds, strict=True):
            node = message.metadata.dst_node_id
            key = id(old), task_for(node)
            if key not in configs:
                config = next(iter(old.config_records.values()), ConfigRecord())
                bare[key[0]] = config
                configs[key] = ConfigRecord({**config, **key[1].to_config()})
            self._configs[node], self._bare[node] = configs[key], bare[key[0]]
            self._keys = (
                next(iter(old.array_records), "arrays"),
                next(iter(old.config_records), "config"),
            )
            message.content = self._content(node)
            if node in stock:
                message.metadata.group_id = group_of(self._downlink.version)
        return messages

    def blank(self, nodes: Iterable[int]) -> list[Message]:
        """Return messages to these nodes with only the inner strategy's settings, to be packed anew."""
        return [
            Message(RecordDict({"config": self._bare[node]}), node, self._kind)
            for node in nodes
            if node in self._bare
        ]

    def whole_again(self, nodes: Iterable[int]) -> Iterable[Message]:
        """Send the whole model to nodes that need it; return the replies, none if no time is left."""
        grid = self.grid
        left = grid.seconds_left() if isinstance(grid, IncrementalGrid) else None
        known = [node for node in nodes if node in self._configs]
        if not known or left == 0:
            return ()
        group = group_of(self._downlink.version)
        messages = [
            Message(self._content(node), node, self._kind, group_id=group) for node in known
        ]
        timeout = _PATIENCE_SECONDS if left is None else left
        return grid.send_and_receive(messages, timeout=timeout)

    def _content(self, node: int) -> RecordDict:
        if node in self._downlink.stock:
            return self._plain_content(node)
        packed, config = self._downlink.for_node(node), self._configs[node]
        self.sent_bytes[node] = self.sent_bytes.get(node, 0) + len(packed)
        key = id(packed), id(config)
        if key not in self._contents:
            self._contents[key] = instruction(self._kind, packed, config)
        return self._contents[key]

    def _plain_content(self, node: int) -> RecordDict:
        stock, config, weights = self._downlink.stock, self._bare[node], self._downlink.weights
        key = stock.kinds[node], id(config)
        if key not in self._contents:
            self._contents[key] = stock.instruction(node, self._kind, weights, config, self._keys)
        records = self._contents[key].array_records.values()
        size = sum(len(array.data) for record in records for array in record.values())
        self.sent_bytes[node] = self.sent_bytes.get(node, 0) + size
        return self._contents[key]
