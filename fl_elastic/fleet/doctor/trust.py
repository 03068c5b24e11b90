"""Whether keys and certificates are valid, fit together, and are nobody else's."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import addresses_of, key_from_pem, read_certificate
from fl_elastic.fleet.doctor.finding import Finding, fail, ok, skipped, warn
from fl_elastic.fleet.files import mode_of, read_bytes
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.node_key import public_part

__all__ = [
    "check_addresses",
    "check_dates",
    "check_node_key",
    "check_pair",
    "check_permissions",
    "check_signer",
]

_SOON = timedelta(days=30)
_RENEW = "on the machine with the authority: fl-elastic fleet rotate DIR --server"


def check_dates(name: str, path: Path, now: datetime, remedy: str = _RENEW) -> Finding:
    """Return whether a certificate is valid now, and for a while."""
    try:
        found = read_certificate(read_bytes(path), str(path))
    except FleetError as error:
        return fail(name, str(error), "restore it, or run fl-elastic fleet init again")
    start, end = found.not_valid_before_utc, found.not_valid_after_utc
    seen = f"valid until {end:%Y-%m-%d}"
    if now < start:
        return fail(name, f"valid from {start:%Y-%m-%d %H:%M} on", "set this machine's clock right")
    if now > end:
        return fail(name, f"ended on {end:%Y-%m-%d}", remedy)
    if now > end - _SOON:
        return warn(name, seen, remedy)
    return ok(name, seen)


def check_signer(folder: FleetFolder) -> Finding:
    """Return whether the fleet's authority signed the server's certificate."""
    name = "chain"
    try:
        server, authority = _certificate(folder.server_certificate), _certificate(folder.server_ca)
        server.verify_directly_issued_by(authority)
    except FleetError as error:
        return fail(name, str(error), "run fl-elastic fleet init again")
    except (ValueError, TypeError, InvalidSignature):
        return fail(name, "another authority signed the server's certificate", _RENEW)
    return ok(name, "the fleet's authority signed the server's certificate")


def check_pair(folder: FleetFolder) -> Finding:
    """Return whether the server's key belongs to its certificate."""
    name = "server key"
    try:
        key = key_from_pem(read_bytes(folder.server_key), str(folder.server_key))
        fits = _certificate(folder.server_certificate).public_key() == key.public_key()
    except FleetError as error:
        return fail(name, str(error), "restore it, or run fl-elastic fleet init again")
    if not fits:
        return fail(name, "it does not belong to the certificate", _RENEW)
    return ok(name, "belongs to the certificate")


def check_addresses(folder: FleetFolder, wanted: Iterable[str]) -> Finding:
    """Return whether the server's certificate is for every address of the inventory."""
    name = "certified addresses"
    try:
        found = addresses_of(_certificate(folder.server_certificate))
    except FleetError as error:
        return fail(name, str(error), "run fl-elastic fleet init again")
    missing = [address for address in wanted if address not in found]
    if missing:
        return fail(name, f"not for {', '.join(missing)}", "run fl-elastic fleet init again")
    return ok(name, ", ".join(found))


def check_node_key(folder: NodeFolder, name: str) -> Finding:
    """Return whether a node's private key can be used."""
    title = f"key of {name}"
    if not folder.key.is_file():
        return fail(
            title, f"{folder.key} is missing", "copy the node's folder to this device again"
        )
    try:
        public = public_part(folder.key, name)
    except FleetError as error:
        return fail(
            title, str(error), f"fl-elastic fleet rotate DIR {name}, and copy its folder here"
        )
    if (
        folder.public_key.is_file()
        and read_bytes(folder.public_key).split()[:2] != public.split()[:2]
    ):
        return fail(
            title, "node.key and node.key.pub are of different keys", "copy the node's folder again"
        )
    return ok(title, "can be used")


def check_permissions(paths: Iterable[Path]) -> Finding:
    """Return whether nobody else can read what is secret."""
    name = "permissions"
    there = [path for path in paths if path.exists()]
    if not there:
        return skipped(name, "nothing secret is here")
    open_ones = [path for path in there if mode_of(path) & 0o077]
    if open_ones:
        seen = ", ".join(f"{path} has {mode_of(path):o}" for path in open_ones)
        return fail(name, seen, f"chmod go= {' '.join(map(str, open_ones))}")
    return ok(name, f"{len(there)} secret files and folders are their owner's alone")


def _certificate(path: Path) -> x509.Certificate:
    return read_certificate(read_bytes(path), str(path))
