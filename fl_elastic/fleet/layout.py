"""Where everything is in the folder of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FleetFolder", "NodeFolder"]


@dataclass(frozen=True)
class NodeFolder:
    """The folder of one node: all that a device needs.

    Attributes
    ----------
    root : Path
        The folder itself, ``nodes/NAME`` of a fleet or its copy on a device.

    Examples
    --------
    >>> NodeFolder(Path("pi0")).key.as_posix()
    'pi0/node.key'
    """

    root: Path

    @property
    def key(self) -> Path:
        """Private key (secret)."""
        return self.root / "node.key"

    @property
    def public_key(self) -> Path:
        """Public key, as the SuperLink is told it."""
        return self.root / "node.key.pub"

    @property
    def ca(self) -> Path:
        """Certificate of the fleet's authority."""
        return self.root / "ca.crt"

    @property
    def settings(self) -> Path:
        """Where the server is, and the node's own settings."""
        return self.root / "node.toml"


@dataclass(frozen=True)
class FleetFolder:
    """The folder of a fleet.

    Attributes
    ----------
    root : Path
        The folder itself.

    Examples
    --------
    >>> FleetFolder(Path("fleet")).node("pi0").settings.as_posix()
    'fleet/nodes/pi0/node.toml'
    """

    root: Path

    @property
    def inventory(self) -> Path:
        """The file that says what the fleet is made of."""
        return self.root / "fleet.toml"

    @property
    def authority(self) -> Path:
        """Folder of the authority; a server does not need it, and may not have it."""
        return self.root / "authority"

    @property
    def ca_key(self) -> Path:
        """Private key of the authority (the one secret that everything rests on)."""
        return self.authority / "ca.key"

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.authority / "ca.crt"

    @property
    def server(self) -> Path:
        """Folder of the server: certificate, state and results."""
        return self.root / "server"

    @property
    def server_key(self) -> Path:
        """Private key of the server's certificate (secret)."""
        return self.server / "server.key"

    @property
    def server_certificate(self) -> Path:
        """Certificate of the server."""
        return self.server / "server.crt"

    @property
    def server_ca(self) -> Path:
        """Certificate of the authority, for the server."""
        return self.server / "ca.crt"

    @property
    def state(self) -> Path:
        """Database of the SuperLink: registered keys, runs, messages."""
        return self.server / "state.db"

    @property
    def results(self) -> Path:
        """Folder of what runs leave behind."""
        return self.server / "results"

    @property
    def rounds(self) -> Path:
        """One line of JSON for every round."""
        return self.results / "rounds.jsonl"

    @property
    def nodes(self) -> Path:
        """Folder of the nodes' folders."""
        return self.root / "nodes"

    def node(self, name: str) -> NodeFolder:
        """Return the folder of one node."""
        return NodeFolder(self.nodes / name)

    @property
    def operator(self) -> Path:
        """Home of Flower's commands (``FLWR_HOME``)."""
        return self.root / "operator"

    @property
    def operator_settings(self) -> Path:
        """Where Flower's commands find the SuperLink."""
        return self.operator / "config.toml"

    @property
    def app(self) -> Path:
        """The Flower app that trains a scenario on the fleet."""
        return self.root / "app"
