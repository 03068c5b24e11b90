"""Create the authority and the server certificate if they are missing, and repair invalid ones."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import (
    key_from_pem,
    key_to_pem,
    new_authority,
    new_key,
    new_server_certificate,
    read_certificate,
    server_problem,
)
from fl_elastic.fleet.change import Change, ensure_file
from fl_elastic.fleet.inventory import Server
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.private_files import (
    PRIVATE_FILE,
    PUBLIC_FILE,
    make_folder,
    read_bytes,
    write_file,
)


def authority_certificate(folder: FleetFolder) -> bytes:
    """Return the authority's certificate, from any copy in the fleet's folder.

    Raises
    ------
    FleetError
        If there is no copy.
    """
    for path in _copies(folder):
        if path.is_file():
            return read_bytes(path)
    raise FleetError(
        f"{folder.ca} is missing: this fleet has no authority yet; run fl-elastic fleet init again"
    )


def ensure_authority(folder: FleetFolder, now: datetime) -> Iterator[Change]:
    """Make an authority if the fleet has none; yield the changes.

    An existing key is never replaced. A missing certificate is restored from a copy. The key itself may be kept
    elsewhere, because it is only needed to issue certificates.

    Raises
    ------
    FleetError
        If a file is damaged or cannot be written.
    """
    if make_folder(folder.authority):
        yield Change("created", folder.authority)
    copies = [path for path in _copies(folder) if path.is_file()]
    if folder.ca_key.is_file():
        key = key_from_pem(read_bytes(folder.ca_key), str(folder.ca_key))
        yield Change("kept", folder.ca_key)
    elif copies:
        yield Change("kept", folder.ca_key, "not here: needed only to issue certificates")
        if not folder.ca.is_file():
            write_file(folder.ca, read_bytes(copies[0]), PUBLIC_FILE)
            yield Change("repaired", folder.ca, f"copied from {copies[0]}")
        return
    else:
        key = new_key()
        write_file(folder.ca_key, key_to_pem(key), PRIVATE_FILE)
        yield Change(
            "created", folder.ca_key, "keep it safe: anyone who has it can impersonate the server"
        )
    if folder.ca.is_file():
        _check_pair(folder, key)
        yield Change("kept", folder.ca)
        return
    for path in copies:
        if read_certificate(read_bytes(path), str(path)).public_key() == key.public_key():
            write_file(folder.ca, read_bytes(path), PUBLIC_FILE)
            yield Change("repaired", folder.ca, f"copied from {path}")
            return
    write_file(folder.ca, new_authority(key, now), PUBLIC_FILE)
    yield Change("created", folder.ca)


def ensure_server(folder: FleetFolder, server: Server, now: datetime) -> Iterator[Change]:
    """Make the server's key and certificate, or issue the certificate again if it is not valid.

    Raises
    ------
    FleetError
        If a file is damaged or cannot be written, or the authority's key is needed but missing.
    """
    if make_folder(folder.server):
        yield Change("created", folder.server)
    if folder.server_key.is_file():
        key = key_from_pem(read_bytes(folder.server_key), str(folder.server_key))
        yield Change("kept", folder.server_key)
    else:
        key = new_key()
        write_file(folder.server_key, key_to_pem(key), PRIVATE_FILE)
        yield Change("created", folder.server_key)
    authority = authority_certificate(folder)
    yield ensure_file(folder.server_ca, authority, otherwise="repaired")
    path = folder.server_certificate
    if not path.is_file():
        _issue(folder, key, server, now)
        yield Change("created", path, f"for {', '.join(server.addresses)}")
        return
    found = read_certificate(read_bytes(path), str(path))
    problem = server_problem(
        found, key.public_key(), _parsed(folder, authority), server.addresses, now
    )
    if problem is None:
        yield Change("kept", path)
        return
    _issue(folder, key, server, now)
    yield Change("updated", path, f"issued anew, because {problem}; restart the server")


def renew_server(folder: FleetFolder, server: Server, now: datetime) -> Iterator[Change]:
    """Give the server a new key, and a certificate for it by the same authority.

    Raises
    ------
    FleetError
        If the authority's key is missing, or a file cannot be written.
    """
    key = new_key()
    # Sign before writing: if the process ends between the two files, the next init repairs them.
    certificate = _certificate(folder, key, server, now)
    write_file(folder.server_key, key_to_pem(key), PRIVATE_FILE)
    yield Change("updated", folder.server_key, "a new key")
    write_file(folder.server_certificate, certificate, PUBLIC_FILE)
    yield Change("updated", folder.server_certificate, "issued anew; restart the server")


def _issue(
    folder: FleetFolder, key: ec.EllipticCurvePrivateKey, server: Server, now: datetime
) -> None:
    write_file(folder.server_certificate, _certificate(folder, key, server, now), PUBLIC_FILE)


def _certificate(
    folder: FleetFolder, key: ec.EllipticCurvePrivateKey, server: Server, now: datetime
) -> bytes:
    if not folder.ca_key.is_file():
        raise FleetError(
            f"the server needs a new certificate and {folder.ca_key} is not here; "
            "put the authority's key back for this command"
        )
    signer = key_from_pem(read_bytes(folder.ca_key), str(folder.ca_key))
    authority = _parsed(folder, authority_certificate(folder))
    _check_pair(folder, signer)
    if authority.not_valid_after_utc <= now:
        raise FleetError(
            f"the authority {folder.ca} ended on {authority.not_valid_after_utc:%Y-%m-%d}; "
            "make a new fleet and copy its folders to the devices"
        )
    return new_server_certificate(key, signer, authority, server.addresses, now)


def _check_pair(folder: FleetFolder, key: ec.EllipticCurvePrivateKey) -> None:
    certificate = read_certificate(read_bytes(folder.ca), str(folder.ca))
    if certificate.public_key() != key.public_key():
        raise FleetError(
            f"{folder.ca} does not belong to {folder.ca_key}; restore both from the same backup"
        )


def _copies(folder: FleetFolder) -> list[Path]:
    """Return the paths where the authority's certificate may be, the preferred one first."""
    nodes = sorted(folder.nodes.glob("*/ca.crt")) if folder.nodes.is_dir() else []
    return [folder.ca, folder.server_ca, *nodes]


def _parsed(folder: FleetFolder, data: bytes) -> x509.Certificate:
    return read_certificate(data, str(folder.ca))
