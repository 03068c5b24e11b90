"""Checks that keys and certificates are valid and private, and that the server answers and accepts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import addresses_of, key_from_pem, read_certificate
from fl_elastic.fleet.doctor.finding import Finding, Status, fail, ok, skipped, warn
from fl_elastic.fleet.health import Health
from fl_elastic.fleet.inventory import Server
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.node_key import public_part
from fl_elastic.fleet.private_files import mode_of, read_bytes

_SOON = timedelta(days=30)
_RENEW = "on the machine with the authority: fl-elastic fleet rotate DIR --server"
# Flower refuses signatures dated more than 5 s ahead, or 305 s ago. HTTP dates have no fractions of a second.
_AHEAD_WARN, _AHEAD_FAIL = 3.0, 6.0
_BEHIND_WARN, _BEHIND_FAIL = 60.0, 300.0


def check_dates(name: str, path: Path, now: datetime, remedy: str = _RENEW) -> Finding:
    """Check whether a certificate is valid now and for the next month."""
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
    """Check whether the fleet's authority signed the server's certificate."""
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
    """Check whether the server's key belongs to its certificate."""
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
    """Check whether the server's certificate is valid for every address of the inventory."""
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
    """Check whether a node's private key can be used."""
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
    """Check whether secret files are readable by their owner only."""
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


def check_names(known: Sequence[tuple[str, bool]]) -> Finding:
    """Check whether the server's addresses can be resolved here.

    Parameters
    ----------
    known : sequence of (str, bool)
        Each address, and whether it can be resolved.
    """
    name = "name resolution"
    unknown = [address for address, found in known if not found]
    if not unknown:
        return ok(name, ", ".join(address for address, _ in known))
    seen = f"unknown here: {', '.join(unknown)}"
    remedy = "mend the name service or /etc/hosts, or add an IP address with fl-elastic fleet init"
    return fail(name, seen, remedy) if len(unknown) == len(known) else warn(name, seen, remedy)


def check_server(
    server: Server, answers: Sequence[tuple[str, Health]], missing: Status = "fail"
) -> Finding:
    """Check whether the server answers, with a certificate of the fleet's authority.

    Parameters
    ----------
    server : Server
        The server; its port is reported.
    answers : sequence of (str, Health)
        Each address that was asked, and its answer.
    missing : {"fail", "warn"}
        Status if there is no answer, which is expected before the start of the server.
    """
    name = "server"
    for address, health in answers:
        if health.ok:
            return ok(name, f"{address} port {server.port} is well, over TLS")
    for address, health in answers:
        if health.certificate_error:
            return fail(
                name, f"{address} port {server.port}: certificate refused ({health.why})",
                "compare ca.crt with the fleet's folder, and check the clock; is it this fleet's server?",
            )  # fmt: skip
    if not answers:
        return skipped(name, "no address that means something")
    seen = "; ".join(f"{address} port {server.port}: {health.why}" for address, health in answers)
    remedy = "start it with fl-elastic fleet server DIR; check cable, firewall and port"
    return Finding(name, missing, seen, remedy)


def check_clock(answers: Sequence[tuple[str, Health]], now: datetime) -> Finding:
    """Check whether this clock and the server's agree, up to the resolution of HTTP dates (one second)."""
    name = "clock"
    dates = [health.date for _, health in answers if health.date is not None]
    if not dates:
        return skipped(name, "the server does not answer, so there is nothing to compare with")
    seconds = (now - dates[0]).total_seconds()
    seen = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server"
    remedy = "synchronise it: timedatectl set-ntp true, and wait before the node starts"
    if seconds >= _AHEAD_FAIL or -seconds >= _BEHIND_FAIL:
        return fail(name, seen, remedy)
    if seconds >= _AHEAD_WARN or -seconds >= _BEHIND_WARN:
        return warn(name, seen, remedy)
    return ok(name, seen)
