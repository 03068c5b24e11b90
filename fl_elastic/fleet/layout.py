"""The paths in the folder of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NodeFolder:
    """The folder of one node, with all that a device needs.

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
        """Public key, as it is registered at the SuperLink."""
        return self.root / "node.key.pub"

    @property
    def ca(self) -> Path:
        """Certificate of the fleet's authority."""
        return self.root / "ca.crt"

    @property
    def settings(self) -> Path:
        """Address of the server, and the node's own settings."""
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
        """File of the fleet's inventory."""
        return self.root / "fleet.toml"

    @property
    def authority(self) -> Path:
        """Folder of the authority; a server does not need it and may lack it."""
        return self.root / "authority"

    @property
    def ca_key(self) -> Path:
        """Private key of the authority (secret; all trust rests on it)."""
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
        """Folder of the results of runs."""
        return self.server / "results"

    @property
    def rounds(self) -> Path:
        """Journal with one line of JSON per round."""
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
        """Settings with which Flower's commands find the SuperLink."""
        return self.operator / "config.toml"

    @property
    def app(self) -> Path:
        """The Flower app that trains a scenario on the fleet."""
        return self.root / "app"
