"""Who trained what: how often each client trains each tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import CheckpointError
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

__all__ = ["ClientCoverage", "CoverageLedger"]

_MEMORY = 0.95


@dataclass
class ClientCoverage:
    """What one client trained so far; arrays have one entry per parameter of the manifest.

    Attributes
    ----------
    device : str
        Class of the client's device.
    rounds : int
        Rounds that the client took part in.
    trained : array of int
        In how many of them it trained the tensor.
    seen, hits : array of float
        Rounds, and rounds in which it trained the tensor, older ones counting less.
    """

    device: str
    rounds: int
    trained: NDArray[np.int64]
    seen: NDArray[np.float64]
    hits: NDArray[np.float64]


@dataclass
class CoverageLedger:
    """Rounds in which each client trained each parameter.

    Parameters
    ----------
    manifest : Manifest
        Of the global model.

    Examples
    --------
    >>> manifest = Manifest(("deep", "head"), ((1,), (1,)), ("float32",) * 2, (Role.PARAMETER,) * 2)
    >>> ledger = CoverageLedger(manifest)
    >>> for _ in range(4):
    ...     ledger.record("node 7", "pi", ["head"])
    >>> ledger.shares()["pi"].tolist()
    [0.0, 1.0]
    """

    manifest: Manifest
    clients: dict[str, ClientCoverage] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters, in the manifest's order."""
        pairs = zip(self.manifest.names, self.manifest.roles, strict=True)
        return tuple(name for name, role in pairs if role is Role.PARAMETER)

    def record(self, client: str, device: str, tensors: Collection[str]) -> None:
        """Enter a round in which a client trained these tensors."""
        names = self.names
        entry = self.clients.get(client)
        if entry is None:
            entry = self.clients[client] = _fresh(device, len(names))
        trained = np.array([name in tensors for name in names], dtype=bool)
        entry.device = device
        entry.rounds += 1
        entry.trained += trained
        entry.seen = _MEMORY * entry.seen + 1.0
        entry.hits = _MEMORY * entry.hits + trained

    def probabilities(self, client: str) -> dict[str, float]:
        """Return how often a client lately trained each parameter.

        The share of its rounds, older ones counting less, plus an imagined one in which it trained everything: an
        unknown client has 1, and nobody has 0.
        """
        entry = self.clients.get(client)
        if entry is None:
            return {}
        shares = (entry.hits + 1.0) / (entry.seen + 1.0)
        return dict(zip(self.names, shares.tolist(), strict=True))

    def shares(self) -> dict[str, NDArray[np.float64]]:
        """Return per device class the share of its clients' rounds in which each parameter was trained."""
        found: dict[str, NDArray[np.float64]] = {}
        for device in sorted({entry.device for entry in self.clients.values()}):
            members = [entry for entry in self.clients.values() if entry.device == device]
            rounds = sum(entry.rounds for entry in members)
            found[device] = np.sum([entry.trained for entry in members], axis=0) / max(rounds, 1)
        return found

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the ledger as arrays for a checkpoint."""
        entries = list(self.clients.values())
        if not entries:
            return {}
        return {
            "clients": np.array(list(self.clients)),
            "devices": np.array([entry.device for entry in entries]),
            "rounds": np.array([entry.rounds for entry in entries]),
            "trained": np.stack([entry.trained for entry in entries]),
            "seen": np.stack([entry.seen for entry in entries]),
            "hits": np.stack([entry.hits for entry in entries]),
        }

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave.

        Raises
        ------
        CheckpointError
            If the arrays are those of another model.
        """
        self.clients = {}
        if not arrays:
            return
        try:
            self._take(arrays)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            self.clients = {}
            raise CheckpointError(
                f"coverage cannot be read ({type(error).__name__}: {error}); delete the checkpoints"
            ) from None

    def _take(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        width = len(self.names)
        if np.shape(arrays["trained"]) != (len(arrays["clients"]), width):
            raise CheckpointError(
                f"coverage of {np.shape(arrays['trained'])} does not fit {width} parameters"
            )
        columns = {name: arrays[name] for name in ("seen", "hits")}
        for column, values in columns.items():
            if np.shape(values) != np.shape(arrays["trained"]):
                raise CheckpointError(f"coverage {column!r} has shape {np.shape(values)}")
        for row, client in enumerate(arrays["clients"]):
            self.clients[str(client)] = ClientCoverage(
                device=str(arrays["devices"][row]),
                rounds=int(arrays["rounds"][row]),
                trained=np.array(arrays["trained"][row], np.int64),
                seen=np.array(arrays["seen"][row], np.float64),
                hits=np.array(arrays["hits"][row], np.float64),
            )


def _fresh(device: str, width: int) -> ClientCoverage:
    return ClientCoverage(
        device=device,
        rounds=0,
        trained=np.zeros(width, np.int64),
        seen=np.zeros(width),
        hits=np.zeros(width),
    )
