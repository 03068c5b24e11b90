"""The fleet's own certificate authority, and the certificate of its server."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_elastic.errors import FleetError
from fl_elastic.fleet.names import is_ip

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Addresses for which every server certificate is valid, because the server's own machine uses them."""

_BACKDATED = timedelta(days=1)  # so that a device whose clock is behind accepts it
_AUTHORITY = timedelta(days=3650)
_SERVER = timedelta(days=730)
_RENEWED = timedelta(days=30)  # a certificate that expires sooner is issued again


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a P-384 key."""
    return ec.generate_private_key(ec.SECP384R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as an unencrypted PEM file."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def key_from_pem(data: bytes, what: str) -> ec.EllipticCurvePrivateKey:
    """Read a key written by `key_to_pem`.

    Raises
    ------
    FleetError
        If it is damaged; ``what`` names the file.
    """
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise FleetError(f"{what} is not a private key; restore it from a backup") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FleetError(f"{what} is a {type(key).__name__}, not an elliptic-curve key; restore it")
    return key


def read_certificate(data: bytes, what: str) -> x509.Certificate:
    """Read a certificate from PEM.

    Raises
    ------
    FleetError
        If it is damaged; ``what`` names the file.
    """
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise FleetError(f"{what} is not a certificate; restore it from a backup") from error


def new_authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> bytes:
    """Return the certificate of a new authority (PEM), valid from a day ago for ten years.

    It may only sign server certificates: a path length of 0 forbids further authorities below it.
    """
    # The name is unique, so that a client of two fleets can distinguish their authorities.
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"fl-elastic fleet {identity.digest.hex()[:12]}")
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(name, name, key.public_key(), now, _AUTHORITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identity, critical=False)
    )
    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def new_server_certificate(
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    addresses: Iterable[str],
    now: datetime,
) -> bytes:
    """Return a certificate for a server (PEM), valid from a day ago for two years.

    Parameters
    ----------
    key : EllipticCurvePrivateKey
        The server's own key.
    authority_key, authority : EllipticCurvePrivateKey, Certificate
        Key and certificate of the signing authority.
    addresses : iterable of str
        Host names and IP addresses by which clients reach the server; the loopback is always added.
    now : datetime
        Present time, with a time zone.
    """
    wanted = covered_addresses(addresses)
    identity = x509.SubjectKeyIdentifier.from_public_key
    alternatives = x509.SubjectAlternativeName([_general_name(address) for address in wanted])
    builder = (
        _builder(_name(wanted[0][:64]), authority.subject, key.public_key(), now, _SERVER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(identity(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
    )
    return builder.sign(authority_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def covered_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct addresses of a server certificate, the given ones first.

    Examples
    --------
    >>> covered_addresses(["server.lan", "127.0.0.1"])
    ('server.lan', '127.0.0.1', 'localhost', '::1')
    """
    return tuple(dict.fromkeys((*addresses, *LOOPBACK)))


def server_problem(
    certificate: x509.Certificate,
    key: CertificatePublicKeyTypes,
    authority: x509.Certificate,
    addresses: Iterable[str],
    now: datetime,
) -> str | None:
    """Return why a server certificate must be issued again; ``None`` if it is valid."""
    if certificate.public_key() != key:
        return "it does not belong to the server's key"
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return "another authority signed it"
    if certificate.not_valid_after_utc <= now + _RENEWED:
        return f"it ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    missing = set(covered_addresses(addresses)) ^ set(addresses_of(certificate))
    if missing:
        return f"its addresses differ by {', '.join(sorted(missing))}"
    return None


def addresses_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names and IP addresses for which a certificate is valid."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    )


def _general_name(address: str) -> x509.GeneralName:
    if is_ip(address):
        return x509.IPAddress(ipaddress.ip_address(address))
    return x509.DNSName(address)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
