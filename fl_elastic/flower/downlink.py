"""How the model goes out to clients: whole, or the tensors that changed since the version a client holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.update import CODECS, Manifest, encode_weights
from fl_elastic.update.change_log import ChangeLog

__all__ = ["Downlink"]

_Weights = Mapping[str, NDArray[Any]]


class Downlink:
    """Packs the model for each client, and remembers which version each one says it holds.

    Version v is the model that round v trains from; after round v's training, evaluation already sees v + 1.

    Parameters
    ----------
    codec : str
        Registered codec that is fit for weights.
    changes_only : bool
        Whether a client that holds an earlier version is sent the tensors that changed since.

    Raises
    ------
    RegistryError
        If the codec is unknown, or writes updates only.
    """

    def __init__(self, codec: str, *, changes_only: bool = False) -> None:
        if not CODECS.make(codec).for_weights:
            raise RegistryError(
                f"codec {codec!r} writes updates only: send models as fp32, fp16 or bf16"
            )
        self.codec = codec
        self.changes_only = changes_only
        self.log = ChangeLog()
        self.held: dict[int, int] = {}
        self._weights: _Weights = {}
        self._manifest: Manifest | None = None
        self._version = -1
        self._checksum = 0
        self._packed: dict[int | None, bytes] = {}

    def serve(self, weights: _Weights, manifest: Manifest, version: int) -> None:
        """Send this model from now on; not modified, and not to be."""
        before, self._weights, self._manifest = self._weights, weights, manifest
        self._packed = {}
        known, self._version = self._version, version
        if not self.changes_only:
            return
        checksum, self._checksum = self._checksum, _checksum(weights)
        if version == known and checksum == self._checksum:
            return
        if version <= known:
            # Not the model that clients hold under these numbers.
            self.held = {}
        self.log.record(version, before, weights)

    @property
    def whole(self) -> bytes:
        """The packed model."""
        return self._message(None)

    def for_node(self, node: int) -> bytes:
        """Return what to send to a client; those who hold the same version get the same object."""
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
        """Send the whole model next time."""
        self.held.pop(node, None)

    def _message(self, since: int | None) -> bytes:
        if self._manifest is None:
            raise UpdateError("there is no model to send before the first round")
        if since not in self._packed:
            self._packed[since] = encode_weights(
                self._weights, self._manifest, version=self._version, codec=self.codec,
                since=since, names=None if since is None else self.log.since(since),
            )  # fmt: skip
        return self._packed[since]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart of the server."""
        if not self.changes_only or self._version < 0:
            return {}
        return {
            "log": np.frombuffer(self.log.to_json().encode(), np.uint8),
            "nodes": np.array(list(self.held), np.uint64),
            "versions": np.array(list(self.held.values()), np.int64),
            "model": np.array([self._version, self._checksum], np.int64),
        }

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""
        self.log = ChangeLog.from_json(arrays["log"].tobytes().decode())
        pairs = zip(arrays["nodes"].tolist(), arrays["versions"].tolist(), strict=True)
        self.held = dict(pairs)
        self._version, self._checksum = arrays["model"].tolist()
        self._weights, self._packed = {}, {}


def _checksum(weights: _Weights) -> int:
    checksum = 0
    for name, array in weights.items():
        described = f"{name}/{array.dtype}/{array.shape}".encode()
        # A tensor without dimensions has no buffer to look into.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(flat.data, zlib.crc32(described, checksum))
    return checksum
