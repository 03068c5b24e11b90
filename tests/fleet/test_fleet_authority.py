"""Certificates: what they say, and that real TLS believes the right ones only."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import (
    addresses_of,
    key_from_pem,
    key_to_pem,
    new_authority,
    new_key,
    new_server_certificate,
    read_certificate,
    server_problem,
)

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
TODAY = datetime.now(UTC)


def pair(now: datetime = TODAY, addresses: tuple[str, ...] = ("server.lan", "10.0.0.5")):
    """An authority and a server's key and certificate of it."""
    signer, key = new_key(), new_key()
    authority = new_authority(signer, now)
    parsed = read_certificate(authority, "ca.crt")
    return authority, key, new_server_certificate(key, signer, parsed, addresses, now), signer


def shake(folder: Path, authority: bytes, key: bytes, certificate: bytes, name: str) -> bool:
    """A TLS handshake in memory; whether both sides came to its end."""
    for file, data in (("ca", authority), ("key", key), ("crt", certificate)):
        (folder / file).write_bytes(data)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "crt", folder / "key")
    client_context = ssl.create_default_context(cafile=str(folder / "ca"))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    steps: list[Callable[[], None]] = [client.do_handshake, server.do_handshake]
    for _ in range(10):
        for step in list(steps):
            try:
                step()
                steps.remove(step)
            except ssl.SSLWantReadError:
                continue
    return not steps


@pytest.mark.parametrize("name", ["server.lan", "10.0.0.5", "localhost", "127.0.0.1", "::1"])
def test_tls_believes_the_server_at_each_address(tmp_path: Path, name: str) -> None:
    authority, key, certificate, _ = pair()
    assert shake(tmp_path, authority, key_to_pem(key), certificate, name)


def test_tls_refuses_another_address(tmp_path: Path) -> None:
    authority, key, certificate, _ = pair()
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(tmp_path, authority, key_to_pem(key), certificate, "other.lan")


def test_tls_refuses_another_authority(tmp_path: Path) -> None:
    _, key, certificate, _ = pair()
    other, *_ = pair()
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake(tmp_path, other, key_to_pem(key), certificate, "server.lan")


def test_tls_refuses_an_expired_certificate(tmp_path: Path) -> None:
    authority, key, certificate, _ = pair(now=TODAY - timedelta(days=731))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake(tmp_path, authority, key_to_pem(key), certificate, "server.lan")


def test_the_server_cannot_pose_as_an_authority(tmp_path: Path) -> None:
    authority, key, certificate, _ = pair()
    forged_key = new_key()
    forged = new_server_certificate(
        forged_key, key, read_certificate(certificate, ""), ["bank.example"], TODAY
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(tmp_path, authority, key_to_pem(forged_key), forged + certificate, "bank.example")


def test_lifetimes() -> None:
    authority, _, certificate, _ = pair(NOW)
    for data, days in ((authority, 3650), (certificate, 730)):
        found = read_certificate(data, "")
        assert found.not_valid_before_utc == NOW - timedelta(days=1)
        assert found.not_valid_after_utc == NOW + timedelta(days=days)


def test_what_certificates_may_be_used_for() -> None:
    authority, _, certificate, _ = pair(NOW)
    ca, server = read_certificate(authority, ""), read_certificate(certificate, "")
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and basic.value.ca and basic.value.path_length == 0
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert set(addresses_of(server)) == {"server.lan", "10.0.0.5", "localhost", "127.0.0.1", "::1"}


def test_a_server_certificate_that_fits_has_no_problem() -> None:
    authority, key, certificate, _ = pair(NOW)
    problem = server_problem(
        read_certificate(certificate, ""), key.public_key(), read_certificate(authority, ""),
        ["10.0.0.5", "server.lan"], NOW,
    )  # fmt: skip
    assert problem is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("key", "server's key"),
        ("authority", "another authority"),
        ("time", "ends on 2032-04-30"),
        ("addresses", "differ by new.lan"),
        ("fewer", "differ by 10.0.0.5"),
    ],
)
def test_problems_of_a_server_certificate_are_named(change: str, words: str) -> None:
    authority, key, certificate, _ = pair(NOW)
    other_authority, other_key, _, _ = pair(NOW)
    wanted = {"addresses": ["server.lan", "10.0.0.5", "new.lan"], "fewer": ["server.lan"]}
    problem = server_problem(
        read_certificate(certificate, ""),
        (other_key if change == "key" else key).public_key(),
        read_certificate(other_authority if change == "authority" else authority, ""),
        wanted.get(change, ["server.lan", "10.0.0.5"]),
        NOW + timedelta(days=710) if change == "time" else NOW,
    )
    assert problem is not None and words in problem


def test_damaged_files_are_named() -> None:
    with pytest.raises(FleetError, match=r"here/ca\.key is not a private key"):
        key_from_pem(b"nonsense", "here/ca.key")
    with pytest.raises(FleetError, match=r"here/ca\.crt is not a certificate"):
        read_certificate(
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "here/ca.crt"
        )
