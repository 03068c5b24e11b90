"""Validate user input: node names, server addresses, settings of a node."""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Iterable

from fl_elastic.errors import FleetError
from fl_elastic.settings import Scalar

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_name(name: str) -> str:
    """Return the name of a node, which is also that of its folder, if it is valid.

    Raises
    ------
    FleetError
        If it has other characters than letters, digits and inner dashes, or more than 32.

    Examples
    --------
    >>> check_name("pi-0")
    'pi-0'
    """
    if _NAME.fullmatch(name) is None:
        raise FleetError(
            f"node name {name!r}: use up to 32 letters, digits and dashes, "
            "with a letter or digit at both ends, as in pi-0"
        )
    return name


def is_ip(address: str) -> bool:
    """Return whether the address is an IP address, not a host name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def check_address(address: str) -> str:
    """Return a host name or IP address in normal form, without the brackets of IPv6.

    Raises
    ------
    FleetError
        If it is neither.

    Examples
    --------
    >>> check_address("Server.lan"), check_address("[2001:DB8::1]")
    ('server.lan', '2001:db8::1')
    """
    plain = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if is_ip(plain):
        return str(ipaddress.ip_address(plain))
    labels = plain.removesuffix(".").split(".")
    # A name whose last label consists of digits is a mistyped IP address.
    named = all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdecimal()
    if not named or len(plain) > 253:
        raise FleetError(
            f"server address {address!r}: expected a host name or an IP address without a scheme "
            "or port, as in server.lan or 10.0.0.5; the port has an option of its own"
        )
    return plain.removesuffix(".").lower()


def check_port(port: int) -> int:
    """Return a port number if it is valid.

    Raises
    ------
    FleetError
        If it is not between 1 and 65535.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise FleetError(f"port {port!r}: expected a whole number from 1 to 65535")
    return port


def address_and_port(address: str, port: int) -> str:
    """Return address and port joined, as Flower's commands expect them.

    Examples
    --------
    >>> address_and_port("server.lan", 8000), address_and_port("::1", 8000)
    ('server.lan:8000', '[::1]:8000')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``; the value is TOML, or otherwise plain text.

    Raises
    ------
    FleetError
        If there is no key, or the value is not a number, bool or text.

    Examples
    --------
    >>> parse_setting("deadline=2.5"), parse_setting("data-root=/srv/data")
    (('deadline', 2.5), ('data-root', '/srv/data'))
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or _KEY.fullmatch(key) is None:
        raise FleetError(f"setting {text!r}: expected key=value, as in deadline=60")
    try:
        read = tomllib.loads(f"value = {value}")
    except (tomllib.TOMLDecodeError, RecursionError):
        read = {}
    # Text with a line break could contain further keys.
    found = read["value"] if read.keys() == {"value"} else value
    if not isinstance(found, (bool, int, float, str)):
        raise FleetError(
            f"setting {text!r}: {type(found).__name__} is not possible here; "
            "expected a number, true, false or text"
        )
    if isinstance(found, float) and not math.isfinite(found):
        raise FleetError(f"setting {text!r}: expected a finite number")
    return key, found


def parse_settings(texts: Iterable[str]) -> dict[str, Scalar]:
    """Read several ``key=value`` texts; if a key is repeated, its last value counts.

    Raises
    ------
    FleetError
        As for `parse_setting`.
    """
    return dict(parse_setting(text) for text in texts)
