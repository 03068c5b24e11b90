"""The environment of Flower's processes: no telemetry, and no proxy on the way to the server."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import LOOPBACK

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


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
        Addresses of the server, which is never reached through a proxy.
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
