"""Command lines of Flower's server and node, and the environment of its processes, without telemetry."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import LOOPBACK
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.names import address_and_port
from fl_elastic.fleet.node_settings import NodeSettings
from fl_elastic.settings import Scalar

LOOPBACK_HOST = "127.0.0.1"
"""Address at which only a node's own helper processes reach it."""

RUNTIME_PORT = 9094
"""Port on the loopback at which a node's own helper processes reach it."""

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def superlink_arguments(folder: FleetFolder, host: str, port: int) -> tuple[str, ...]:
    """Return the arguments of ``flower-superlink``.

    Parameters
    ----------
    folder : FleetFolder
        The fleet's folder, absolute.
    host, port : str and int
        Where the server listens.
    """
    return (
        "--ssl-ca-certfile", str(folder.server_ca),
        "--ssl-certfile", str(folder.server_certificate),
        "--ssl-keyfile", str(folder.server_key),
        "--enable-supernode-auth",
        "--database", str(folder.state),
        "--host", host,
        "--port", str(port),
        "--disable-runtime-dependency-installation",
    )  # fmt: skip


def supernode_arguments(
    folder: NodeFolder,
    settings: NodeSettings,
    address: str,
    config: Mapping[str, Scalar],
    runtime_port: int,
) -> tuple[str, ...]:
    """Return the arguments of ``flower-supernode``.

    Parameters
    ----------
    folder : NodeFolder
        The node's folder, absolute.
    settings : NodeSettings
        The node's settings.
    address : str
        The server address to use.
    config : mapping of str to bool, int, float or str
        Settings for the node's app.
    runtime_port : int
        Port at which the node's own helper processes reach it; each node of a machine needs its own.
    """
    return (
        "--root-certificates", str(folder.ca),
        "--auth-supernode-private-key", str(folder.key),
        "--superlink", address_and_port(address, settings.server.port),
        "--node-config", config_text(config),
        "--host", LOOPBACK_HOST,
        "--port", str(runtime_port),
    )  # fmt: skip


def config_text(config: Mapping[str, Scalar]) -> str:
    """Return settings in the form of ``--node-config``.

    Examples
    --------
    >>> config_text({"partition-id": 0, "data-root": "/my data"})
    'partition-id=0 data-root="/my data"'
    """
    return " ".join(f"{key}={config_value(value)}" for key, value in config.items())


def config_value(value: Scalar) -> str:
    r"""Return one value as TOML that Flower's parser of ``key="..."`` does not cut short.

    Raises
    ------
    FleetError
        If it is not a number, truth value or text.

    Examples
    --------
    >>> print(config_value('a "b"'), config_value(True), config_value(2.0))
    "a \u0022b\u0022" true 2.0
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if not isinstance(value, str):
        raise FleetError(f"setting {value!r}: expected a number, true, false or text")
    # Flower ends a quoted value at the next quotation mark, escaped or not. JSON's escapes are also valid in TOML,
    # but JSON leaves DEL unescaped, which TOML forbids.
    text = json.dumps(value, ensure_ascii=False)[1:-1]
    return '"' + text.replace('\\"', "\\u0022").replace("\x7f", "\\u007f") + '"'


def command_path(name: str) -> str:
    """Return the path of one of Flower's commands, preferably that of this Python.

    Raises
    ------
    FleetError
        If the command is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    if beside.is_file() and os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise FleetError(
            f"the command {name} is neither beside {sys.executable} nor on the PATH; "
            "install Flower into the same environment: python -m pip install 'flwr>=1.41,<1.50'"
        )
    return found


def flower_environment(
    base: Mapping[str, str], home: Path, addresses: Iterable[str], threads: int = 0
) -> dict[str, str]:
    """Return the environment of one of Flower's processes.

    Parameters
    ----------
    base : mapping of str to str
        The environment of this process.
    home : Path
        The process's own ``FLWR_HOME``.
    addresses : iterable of str
        Addresses of the server, for which proxies are disabled.
    threads : int
        Number of threads of numerical libraries; 0 leaves the choice to them.

    Examples
    --------
    >>> made = flower_environment({"PATH": "/bin", "NO_PROXY": "x"}, Path("/h"), ["server.lan"])
    >>> made["NO_PROXY"], made["FLWR_TELEMETRY_ENABLED"]
    ('x,server.lan,localhost,127.0.0.1,::1', '0')
    """
    direct = [base.get("NO_PROXY", ""), base.get("no_proxy", ""), *addresses, *LOOPBACK]
    listed = ",".join(dict.fromkeys(a for part in direct for a in part.split(",") if a))
    # Flower starts its helper processes by name, and a service has no virtual environment on its PATH.
    here = str(Path(sys.executable).parent)
    path = base.get("PATH", os.defpath)
    made = {
        **base,
        **_QUIET,
        "FLWR_HOME": str(home),
        "NO_PROXY": listed,
        "no_proxy": listed,
        "PATH": path if path.split(os.pathsep)[0] == here else f"{here}{os.pathsep}{path}",
    }
    return made | {"OMP_NUM_THREADS": str(threads)} if threads > 0 else made
