"""A whole fleet on one machine: a real server and real nodes, with TLS and keys, on the loopback."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import FlowerCommands, flower_at
from fl_elastic.fleet.health import ask_health
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.member import Member, end_members, start_member
from fl_elastic.fleet.members import add_node
from fl_elastic.fleet.provision import Wanted, numbered, provision
from fl_elastic.fleet.register import register
from fl_elastic.fleet.serve import Launch, node_launch, server_launch
from fl_elastic.fleet.submit import submit
from fl_elastic.settings import Scalar

SERVER = "server"
"""Name of the server among the processes."""
_HOST = "127.0.0.1"
_PREFIX = "fl-elastic-fleet-"
_SERVER_SECONDS = 90.0


class LocalFleet:
    """A SuperLink and SuperNodes as a context manager; all processes end when the context is left in any way.

    Parameters
    ----------
    nodes : int
        Number of nodes.
    folder : Path, optional
        Folder for all files; by default a temporary folder that is removed at the end.
    config : mapping of str to bool, int, float or str, optional
        Settings of every node, such as ``threads``.
    node_config : sequence of such mappings, optional
        Settings of single nodes, in order.
    environment : mapping of str to str, optional
        Environment variables in addition to those of this process.
    tell : callable, optional
        Called with a message for each event.

    Raises
    ------
    FleetError
        If a process does not start.
    """

    def __init__(
        self,
        nodes: int,
        folder: Path | None = None,
        *,
        config: Mapping[str, Scalar] | None = None,
        node_config: Sequence[Mapping[str, Scalar]] = (),
        environment: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        if nodes < 1:
            raise FleetError(f"a fleet of {nodes} nodes: expected at least one")
        self.names = numbered(nodes)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._given = folder
        self._config = dict(config or {})
        self._node_config = list(node_config)
        self._environment = {**os.environ, **(environment or {})}
        self._tell = tell
        self.members: dict[str, Member] = {}
        self.folder = FleetFolder(Path())

    def __enter__(self) -> LocalFleet:
        try:
            self._provision()
            self.start(SERVER)
            self.wait_for_server()
            self._tell("server is up")
            register(self.folder, self.flower)
            for name in self.names:
                self.start(name)
            self.wait_online(self.names)
            self._tell(f"{len(self.names)} nodes are online")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def flower(self) -> FlowerCommands:
        """Flower's command, with this fleet's settings."""
        return flower_at(self.folder, load_inventory(self.folder.inventory).server)

    def start(self, name: str) -> Member:
        """Start the server or a node, unless it is running; return its process."""
        found = self.members.get(name)
        if found is not None and found.running:
            return found
        member = self.members[name] = start_member(
            self.folder.root / "logs", name, self._launch(name)
        )
        return member

    def log(self, name: str) -> str:
        """Return the output of a process."""
        return self._member(name).log.read_text(errors="replace")

    def end_of_log(self, name: str, most: int) -> list[str]:
        """Return the last lines that a process has printed, which contain the error of a failed run."""
        return [line for line in self.log(name).splitlines() if line.strip()][-most:]

    def wait_for_server(self) -> None:
        """Wait until the server answers over TLS.

        Raises
        ------
        FleetError
            If it does not answer in time, or ends.
        """
        server = load_inventory(self.folder.inventory).server
        until = time.monotonic() + _SERVER_SECONDS
        while not (health := ask_health(server, _HOST, self.folder.server_ca)).ok:
            if not self._member(SERVER).running or time.monotonic() > until:
                raise FleetError(f"the server did not come up ({health.why}): {self._end(SERVER)}")
            time.sleep(0.2)

    def online(self) -> set[str]:
        """Return the names of the nodes that the server reports as online.

        A node that was killed is still reported for a while.
        """
        ids = {node.node_id: node.name for node in load_inventory(self.folder.inventory).nodes}
        states = self.flower.nodes()
        return {
            ids.get(state.node_id, state.node_id) for state in states if state.status == "online"
        }

    def wait_online(self, names: Sequence[str], seconds: float = 120.0) -> None:
        """Wait until these nodes are online.

        Raises
        ------
        FleetError
            If they are not online in time, or one of them ends.
        """
        until = time.monotonic() + seconds
        while not (online := self.online()).issuperset(names):
            for name in names:
                if not self._member(name).running:
                    raise FleetError(f"{name} has ended: {self._end(name)}")
            if time.monotonic() > until:
                there = ", ".join(sorted(online)) or "none"
                raise FleetError(
                    f"not all online after {seconds:.0f} s: {there} of {', '.join(names)}"
                )
            time.sleep(0.5)

    def submit(self, app: Path | None = None, **settings: Scalar) -> str:
        """Submit an app, by default the fleet's own, and return the run's id.

        Underscores in the names of settings stand for dashes.
        """
        given = {key.replace("_", "-"): value for key, value in settings.items()}
        return submit(self.flower, self.folder.app if app is None else app, given)

    def close(self) -> None:
        """End every process and remove a temporary folder; Ctrl-C in the meantime kills them at once."""
        members, self.members = list(self.members.values()), {}
        temporary, self._temporary = self._temporary, None
        try:
            # End the nodes first, while the server can still handle their sign-off.
            end_members(member for member in members if member.name != SERVER)
        finally:
            end_members(members)
            if temporary is not None:
                temporary.cleanup()

    def _provision(self) -> None:
        root = self._given
        if root is None:
            self._temporary = tempfile.TemporaryDirectory(
                prefix=_PREFIX, ignore_cleanup_errors=True
            )
            root = Path(self._temporary.name)
        self.folder = FleetFolder(root.resolve())
        ports = free_ports(1 + len(self.names))
        wanted = Wanted((_HOST,), ports[0], self.names)
        provision(self.folder, wanted)
        for index, name in enumerate(self.names):
            own = self._node_config[index] if index < len(self._node_config) else {}
            state: dict[str, Scalar] = {
                "state-dir": str(self.folder.root / "state" / name),
                "runtime-port": ports[1 + index],
            }
            add_node(self.folder, name, {**state, **self._config, **own})

    def _launch(self, name: str) -> Launch:
        # The processes run in their own folders, not in the caller's.
        if name == SERVER:
            return server_launch(self.folder, self._environment, _HOST)
        return node_launch(self.folder.node(name), self._environment)

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise FleetError(f"no process {name!r} was started; known: {', '.join(self.members)}")
        return self.members[name]

    def _end(self, name: str) -> str:
        return " | ".join(self.end_of_log(name, 5)) or "it printed nothing"


def free_ports(count: int) -> list[int]:
    """Return unused ports of the loopback interface."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
