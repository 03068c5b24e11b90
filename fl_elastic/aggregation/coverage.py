"""Coverage: how often each client trains each tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import CheckpointError
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

# Factor by which the weight of a round falls with each later round.
_MEMORY = 0.95


@dataclass
class ClientCoverage:
    """What one client has trained so far; arrays have one entry per parameter of the manifest.

    Attributes
    ----------
    device : str
        Class of the client's device.
    rounds : int
        Number of rounds that the client took part in.
    trained : array of int
        Number of rounds in which it trained each tensor.
    seen, hits : array of float
        Decayed counts of rounds, and of rounds in which it trained the tensor.
    """

    device: str
    rounds: int
    trained: NDArray[np.int64]
    seen: NDArray[np.float64]
    hits: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CoverageState:
    """State of a `CoverageLedger`.

    ``clients``, ``devices`` and ``rounds`` have an entry per client; ``trained``, ``seen`` and ``hits`` a row per
    client, as in `ClientCoverage`.
    """

    clients: tuple[str, ...]
    devices: tuple[str, ...]
    rounds: NDArray[np.int64]
    trained: NDArray[np.int64]
    seen: NDArray[np.float64]
    hits: NDArray[np.float64]

    def __post_init__(self) -> None:
        tables = {counts.shape for counts in (self.trained, self.seen, self.hits)}
        rows = {len(self.clients), len(self.devices), *self.rounds.shape}
        if len(tables) != 1 or self.trained.ndim != 2 or rows != {len(self.trained)}:
            raise CheckpointError(
                f"coverage has tables of shapes {sorted(tables)} for {sorted(rows)} clients"
            )


@dataclass
class CoverageLedger:
    """Rounds in which each client trained each parameter.

    Parameters
    ----------
    manifest : Manifest
        Manifest of the global model.

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
        """Names of the parameters, in the manifest's order."""
        pairs = zip(self.manifest.names, self.manifest.roles, strict=True)
        return tuple(name for name, role in pairs if role is Role.PARAMETER)

    def record(self, client: str, device: str, tensors: Collection[str]) -> None:
        """Record a round in which a client trained these tensors."""
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
        """Return how often a client has trained each parameter lately.

        This is the share of its rounds in which it trained the parameter. Older rounds have less weight, and one
        fictitious round in which it trained everything is added: an unknown client has 1, and no client has 0.
        """
        entry = self.clients.get(client)
        if entry is None:
            return {}
        shares = (entry.hits + 1.0) / (entry.seen + 1.0)
        return dict(zip(self.names, shares.tolist(), strict=True))

    def shares(self) -> dict[str, NDArray[np.float64]]:
        """Return, by device class, the share of its clients' rounds in which each parameter was trained."""
        found: dict[str, NDArray[np.float64]] = {}
        for device in sorted({entry.device for entry in self.clients.values()}):
            members = [entry for entry in self.clients.values() if entry.device == device]
            rounds = sum(entry.rounds for entry in members)
            found[device] = np.sum([entry.trained for entry in members], axis=0) / max(rounds, 1)
        return found

    def to_state(self) -> CoverageState:
        """Return the state to be stored."""
        entries, width = [*self.clients.values()], len(self.names)

        def table(kind: type, rows: Iterable[NDArray[Any]]) -> NDArray[Any]:
            return np.array([*rows], kind).reshape(len(entries), width)

        return CoverageState(
            tuple(self.clients), tuple(counts.device for counts in entries),
            np.array([counts.rounds for counts in entries], np.int64),
            table(np.int64, (counts.trained for counts in entries)),
            table(np.float64, (counts.seen for counts in entries)),
            table(np.float64, (counts.hits for counts in entries)),
        )  # fmt: skip

    def restore(self, state: CoverageState) -> None:
        """Restore what `to_state` returned.

        Raises
        ------
        CheckpointError
            If the state is of another model.
        """
        width = state.trained.shape[1]
        if width != len(self.names):
            raise CheckpointError(
                f"coverage is of {width} parameters, the model has {len(self.names)}: delete the checkpoints"
            )
        self.clients = {
            client: ClientCoverage(state.devices[row], int(state.rounds[row]), *(
                counts[row].copy() for counts in (state.trained, state.seen, state.hits)
            ))
            for row, client in enumerate(state.clients)
        }  # fmt: skip


def _fresh(device: str, width: int) -> ClientCoverage:
    return ClientCoverage(
        device=device,
        rounds=0,
        trained=np.zeros(width, np.int64),
        seen=np.zeros(width),
        hits=np.zeros(width),
    )
