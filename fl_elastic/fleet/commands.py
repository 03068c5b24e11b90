"""Command lines of Flower's server and node, as pure functions of a fleet's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fl_elastic.errors import FleetError
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.names import address_and_port
from fl_elastic.fleet.node_settings import NodeSettings
from fl_elastic.settings import Scalar

LOOPBACK_HOST = "127.0.0.1"
"""Address at which a node is reached, by its own helper processes only."""

RUNTIME_PORT = 9094
"""Port on the loopback at which a node's own helper processes reach it."""


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
    # Flower ends a quoted value at the next quotation mark, escaped or not. JSON's escapes are also TOML's, except
    # for DEL, which JSON leaves unescaped and TOML forbids.
    text = json.dumps(value, ensure_ascii=False)[1:-1]
    return '"' + text.replace('\\"', "\\u0022").replace("\x7f", "\\u007f") + '"'
