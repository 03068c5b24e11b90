"""The key of a node, by which the SuperLink identifies nodes and refuses unknown ones."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_elastic.errors import FleetError
from fl_elastic.fleet.private_files import read_bytes
from fl_elastic.registry import first_line


@dataclass(frozen=True)
class NodeKey:
    """An elliptic-curve key in OpenSSH's format, as Flower's commands read it.

    Attributes
    ----------
    private, public : bytes
        Content of ``node.key`` and ``node.key.pub``.
    """

    private: bytes
    public: bytes


def new_node_key(name: str) -> NodeKey:
    """Make a P-384 key; the public key carries the node's name as a comment.

    Examples
    --------
    >>> new_node_key("pi0").public.split()[0].decode()
    'ecdsa-sha2-nistp384'
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    return NodeKey(private, _public_line(key.public_key(), name))


def public_part(path: Path, name: str) -> bytes:
    """Return the content of ``node.key.pub`` for the private key at ``path``.

    Raises
    ------
    FleetError
        If the file is not an elliptic-curve key in OpenSSH's format.
    """
    try:
        key = serialization.load_ssh_private_key(read_bytes(path), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"it is of type {type(key).__name__}")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FleetError(
            f"{path} is not an elliptic-curve key in OpenSSH's format ({first_line(error)}); "
            f"restore it, or make a new one with: fl-elastic fleet rotate DIR {name}"
        ) from error
    return _public_line(key.public_key(), name)


def fingerprint(path: Path) -> str:
    """Return the fingerprint of a public key, as ``ssh-keygen -l`` shows it.

    Raises
    ------
    FleetError
        If the file is not a public key in OpenSSH's format.
    """
    words = read_bytes(path).split()
    try:
        serialization.load_ssh_public_key(b" ".join(words[:2]))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FleetError(
            f"{path} is not a public key in OpenSSH's format ({first_line(error)}); "
            "restore it, or delete it where node.key is still beside it and run fl-elastic fleet init again"
        ) from error
    digest = hashlib.sha256(base64.b64decode(words[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _public_line(key: ec.EllipticCurvePublicKey, name: str) -> bytes:
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line + b" " + name.encode() + b"\n"
