"""Replace this process by Flower's server or node, so that a service manager watches the right process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import LOOPBACK
from fl_elastic.fleet.commands import (
    LOOPBACK_HOST,
    RUNTIME_PORT,
    command_path,
    flower_environment,
    superlink_arguments,
    supernode_arguments,
)
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.names import check_port
from fl_elastic.fleet.node_settings import NodeSettings, load_node_settings
from fl_elastic.fleet.private_files import make_folder
from fl_elastic.fleet.server_database import fit_to_release
from fl_elastic.settings import Scalar

_IF_REFUSED = (
    '{name}: a server that does not know the node\'s key answers "Failed to activate": let it in there, with '
    "fl-elastic fleet register FLEET"
)
_HERE_ALONE = (
    "listening on {host}, for this machine alone: nodes of others need the gateway (deploy/gateway) before it, or "
    "--host with the server's address in the fleet's own network"
)
OTHERS_NOTHING = 0o077
"""Umask of Flower's processes: their databases hold models and messages."""
ANYWHERE = ("0.0.0.0", "::")
"""Hosts that stand for every address of this machine."""


@dataclass(frozen=True)
class Launch:
    """A process that is about to be started.

    Parameters
    ----------
    command : tuple of str
        Path of the program, and its arguments.
    environment : mapping of str to str
        The complete environment.
    folders : tuple of Path
        Folders that are made before the start. The process works in the last one, which holds no code that its
        helper processes could import by mistake.
    host, port : str and int
        Address and port on which it will listen.
    port_option : str
        Name of the command's option that chooses another port.
    database : Path, optional
        Database of a server, to be adapted to the release of Flower that is started.
    notice : str
        How the start may fail; printed for the user before the start, because nothing can be printed afterwards.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folders: tuple[Path, ...]
    host: str
    port: int
    port_option: str = "--port"
    notice: str = ""
    database: Path | None = None

    @property
    def folder(self) -> Path:
        """The working folder."""
        return self.folders[-1]

    def prepare(self) -> None:
        """Make the folders; raise FleetError if that fails."""
        for folder in self.folders:
            make_folder(folder)


def server_launch(
    folder: FleetFolder, base: Mapping[str, str], host: str = LOOPBACK_HOST, port: int | None = None
) -> Launch:
    """Return the command and environment that start the fleet's server.

    Parameters
    ----------
    folder : FleetFolder
        The fleet's folder; the server needs ``fleet.toml`` and ``server/`` only.
    base : mapping of str to str
        The environment to start from.
    host : str
        Address to listen on; by default reachable from this machine only.
    port : int, optional
        Port to listen on; by default the inventory's.

    Raises
    ------
    FleetError
        If a file is missing, the certificate is not valid for that host, or Flower is not installed.
    """
    folder = FleetFolder(folder.root.resolve())
    server = load_inventory(folder.inventory).server
    _present(folder.server_ca, folder.server_certificate, folder.server_key)
    if host not in (*ANYWHERE, *LOOPBACK, *server.addresses):
        # The server's own helper processes connect to this host and check the certificate like any client.
        raise FleetError(
            f"host {host} is not among the addresses of the certificate "
            f"({', '.join(server.addresses)}); add it with: fl-elastic fleet init DIR --server-address ..."
        )
    home = folder.server / "flower"
    wanted = check_port(server.port if port is None else port)
    arguments = superlink_arguments(folder, host, wanted)
    environment = flower_environment(base, home, (*server.addresses, host))
    return Launch(
        (command_path("flower-superlink"), *arguments),
        environment,
        (folder.results, home),
        host,
        wanted,
        notice=_HERE_ALONE.format(host=host) if host in LOOPBACK else "",
        database=folder.state,
    )


def node_launch(
    folder: NodeFolder,
    base: Mapping[str, str],
    *,
    state: Path | None = None,
    data_root: str | None = None,
    runtime_port: int | None = None,
    resolvable: Callable[[str], bool] | None = None,
) -> Launch:
    """Return the command and environment that start a node.

    Parameters
    ----------
    folder : NodeFolder
        The node's folder.
    base : mapping of str to str
        The environment to start from. ``STATE_DIRECTORY`` (set by systemd) and ``FL_ELASTIC_DATA_ROOT`` are
        used if neither an argument nor ``node.toml`` gives the folder.
    state : Path, optional
        Folder for everything that lasts between rounds.
    data_root : str, optional
        Folder of datasets.
    runtime_port : int, optional
        Port on the loopback at which the node's own helper processes reach it.
    resolvable : callable, optional
        Returns whether a name can be resolved; the first address for which it does is used.

    Raises
    ------
    FleetError
        If a file is missing or damaged, a folder cannot be made, or Flower is not installed.
    """
    folder = NodeFolder(folder.root.resolve())
    settings = load_node_settings(folder.settings)
    _present(folder.key, folder.ca)
    place = state_folder(folder, settings, base, state)
    home = place / "flower"
    config = _node_config(folder, settings, base, place, data_root)
    port = (
        settings.config.get("runtime-port", RUNTIME_PORT) if runtime_port is None else runtime_port
    )
    if not isinstance(port, int):
        raise FleetError(f"{folder.settings}: runtime-port is {port!r}; expected a whole number")
    addresses = settings.server.addresses
    found = (address for address in addresses if (resolvable or resolves)(address))
    # If no address can be resolved yet, Flower keeps trying the preferred one.
    address = next(found, addresses[0])
    arguments = supernode_arguments(folder, settings, address, config, check_port(port))
    environment = flower_environment(base, home, addresses, _threads(folder, settings))
    command = (command_path("flower-supernode"), *arguments)
    notice = _IF_REFUSED.format(name=settings.name)
    return Launch(
        command, environment, (place, home), LOOPBACK_HOST, port, "--runtime-port", notice
    )


def become(launch: Launch) -> None:
    """Replace this process by the one to start; nothing after this call is executed.

    Raises
    ------
    FleetError
        If its port is taken, or it cannot be started.
    """
    launch.prepare()
    check_port_is_free(launch.host, launch.port, launch.port_option)
    if launch.database is not None and (done := fit_to_release(launch.database, version("flwr"))):
        print(done, file=sys.stderr, flush=True)
    if launch.notice:
        print(launch.notice, file=sys.stderr, flush=True)
    before = os.umask(OTHERS_NOTHING)
    try:
        os.chdir(launch.folder)
        os.execve(launch.command[0], list(launch.command), dict(launch.environment))
    except OSError as error:
        raise FleetError(f"cannot start {launch.command[0]}: {error.strerror or error}") from error
    finally:
        os.umask(before)


def check_port_is_free(host: str, port: int, option: str = "--port") -> None:
    """Raise FleetError if a port cannot be listened on; the message names the option for another port.

    Raises
    ------
    FleetError
        If another process uses it, or listening is not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FleetError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; "
                f"another server may be running already: stop it, or choose a port with {option}"
            ) from error


def resolves(address: str) -> bool:
    """Return whether a server name can be resolved here."""
    try:
        return bool(socket.getaddrinfo(address, None))
    except (OSError, UnicodeError):
        return False


def _present(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise FleetError(
                f"{path} is missing; make it with: fl-elastic fleet init DIR, or copy the folder again"
            )


def state_folder(
    folder: NodeFolder, settings: NodeSettings, base: Mapping[str, str], given: Path | None = None
) -> Path:
    """Return the state folder: the given one, else that of ``node.toml``, else that of the service."""
    if given is not None:
        return given.resolve()
    # systemd gives a list if a service has several folders; the first one is the main one.
    from_service = base.get("STATE_DIRECTORY", "").split(":")[0]
    chosen = settings.config.get("state-dir") or from_service or "state"
    return (folder.root / str(chosen)).resolve()


def _node_config(
    folder: NodeFolder,
    settings: NodeSettings,
    base: Mapping[str, str],
    state: Path,
    data_root: str | None,
) -> dict[str, Scalar]:
    config: dict[str, Scalar] = {"partition-id": 0, "threads": 0, **settings.config}
    config.pop("runtime-port", None)
    # The node works in another folder: make relative paths absolute.
    for key in ("data-root", "stream-state-dir"):
        if config.get(key):
            config[key] = str((folder.root / str(config[key])).resolve())
    here = data_root if data_root is not None else base.get("FL_ELASTIC_DATA_ROOT", "")
    if data_root is not None or not config.get("data-root"):
        config["data-root"] = str(Path(here).resolve()) if here else ""
    return config | {"state-dir": str(state), "node-name": settings.name}


def _threads(folder: NodeFolder, settings: NodeSettings) -> int:
    threads = settings.config.get("threads", 0)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 0:
        raise FleetError(
            f"{folder.settings}: threads is {threads!r}; expected a whole number, 0 to measure"
        )
    return threads
