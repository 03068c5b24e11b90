"""The paths in the folder of a fleet."""

from __future__ import annotations

from pathlib import Path


class NodeFolder:
    """The folder of one node, with all files that a device needs.

    Attributes
    ----------
    root : Path
        The folder itself, ``nodes/NAME`` of a fleet or its copy on a device.

    Examples
    --------
    >>> NodeFolder(Path("pi0")).key.as_posix()
    'pi0/node.key'
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # Private key (secret).
        self.key = self.root / "node.key"
        # Public key, as it is registered at the SuperLink.
        self.public_key = self.root / "node.key.pub"
        # Certificate of the fleet's authority.
        self.ca = self.root / "ca.crt"
        # Address of the server, and the node's own settings.
        self.settings = self.root / "node.toml"


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

    def __init__(self, root: Path) -> None:
        self.root = root
        # File of the fleet's inventory.
        self.inventory = self.root / "fleet.toml"
        # Folder of the authority; it may be missing on the server, which does not need it.
        self.authority = self.root / "authority"
        # Private key of the authority (secret: its holder can impersonate the server).
        self.ca_key = self.authority / "ca.key"
        # Certificate of the authority.
        self.ca = self.authority / "ca.crt"
        # Folder of the server: certificate, state and results.
        self.server = self.root / "server"
        # Private key of the server's certificate (secret).
        self.server_key = self.server / "server.key"
        # Certificate of the server.
        self.server_certificate = self.server / "server.crt"
        # Certificate of the authority, for the server.
        self.server_ca = self.server / "ca.crt"
        # Database of the SuperLink: registered keys, runs, messages.
        self.state = self.server / "state.db"
        # Folder of the results of runs.
        self.results = self.server / "results"
        # Journal with one line of JSON per round.
        self.rounds = self.results / "rounds.jsonl"
        # Folder of the nodes' folders.
        self.nodes = self.root / "nodes"
        # Home of Flower's commands (``FLWR_HOME``).
        self.operator = self.root / "operator"
        # Settings with which Flower's commands find the SuperLink.
        self.operator_settings = self.operator / "config.toml"
        # The Flower app that trains a scenario on the fleet.
        self.app = self.root / "app"

    def node(self, name: str) -> NodeFolder:
        """Return the folder of one node."""
        return NodeFolder(self.nodes / name)
