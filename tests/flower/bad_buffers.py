"""Packed updates that are wrong in one way each."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from scripted_clients import manifest

from fl_elastic.flower._compat import ndarray_to_bytes
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.frame import CHECKSUM_BYTES, WIRE_VERSION, checksum
from fl_elastic.update.model_wire import encode_weights

_START = struct.Struct("<4sHBBI")
Damage = Callable[[bytes], bytes]


def rebuilt(
    packed: bytes,
    *,
    payload: Callable[[bytes], bytes] = lambda old: old,
    text: bytes | None = None,
    version: int = WIRE_VERSION,
    kind: int = 1,
    **header: Any,
) -> bytes:
    """The same buffer with other header fields or payload, and a checksum that fits."""
    magic, *_, length = _START.unpack(packed[: _START.size])
    body = packed[_START.size + CHECKSUM_BYTES :]
    fields = json.loads(body[:length]) | header
    written = json.dumps(fields).encode() if text is None else text
    new = payload(body[length:])
    start = _START.pack(magic, version, kind, 0, len(written))
    return start + checksum(start + written, new) + written + new


def header(**fields: Any) -> Damage:
    return lambda packed: rebuilt(packed, **fields)


def last_value(value: float) -> Damage:
    return lambda packed: rebuilt(packed, payload=lambda old: old[:-4] + struct.pack("<f", value))


def other_model(packed: bytes) -> bytes:
    other = Manifest.of_arrays({"w": np.zeros((3, 3), np.float32)})
    update = PartialUpdate({"w": np.ones((3, 3), np.float32)}, {"w": 1}, 7, 1)
    return encode(update, other)


def other_shapes(packed: bytes) -> bytes:
    """Another model's update under this model's hash."""
    return rebuilt(other_model(packed), manifest=manifest().hash, indices=[0])


def whole_model(packed: bytes) -> bytes:
    known = manifest()
    zeros = {
        name: np.zeros(shape, np.float32)
        for name, shape in zip(known.names, known.shapes, strict=True)
    }
    return encode_weights(zeros, known, version=1)


BUFFERS: dict[str, tuple[Damage, str]] = {
    "empty": (lambda packed: b"", "too short"),
    "garbage": (lambda packed: b"x" * 200, "mark of a packed update"),
    "truncated": (lambda packed: packed[:-9], "truncated or damaged"),
    "longer, checksum fits": (header(payload=lambda old: old + b"0000"), "its tensors need"),
    "another wire version": (header(version=WIRE_VERSION + 1), "wire format version"),
    "a whole model": (whole_model, "of kind 2, expected 1"),
    "header not JSON": (header(text=b"{"), "not valid JSON"),
    "wrong manifest": (header(manifest="0" * 16), "manifest '0000000000000000'"),
    "another model under this hash": (other_shapes, "its tensors need"),
    "unknown codec": (header(codec="zip"), "unknown codec 'zip'"),
    "NaN": (last_value(float("nan")), "NaN or infinite"),
    "absurd steps": (header(steps=[10**15, 3]), "step count of"),
    "index outside": (header(indices=[2, 5]), "outside the manifest"),
    "stale": (header(base_version=0), "starts from version 0, this round's is 1"),
    "from the future": (header(base_version=2), "starts from version 2, this round's is 1"),
    "examples disagree": (header(num_examples=8), "header says 8 examples, the reply 7"),
}
"""How the buffer of a client with 7 examples is spoilt, and what the server says about it."""


def archive() -> bytes:
    written = io.BytesIO()
    np.savez(written, packed=np.zeros(9, np.uint8))
    return written.getvalue()


def pickled() -> bytes:
    written = io.BytesIO()
    np.save(written, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return written.getvalue()


ARRAYS: dict[str, tuple[bytes, str]] = {
    "not numpy": (b"hello", "packed buffer cannot be read"),
    "pickled objects": (pickled(), "packed buffer cannot be read"),
    "an archive": (archive(), "packed buffer"),
    "absurd shape": (
        ndarray_to_bytes(np.zeros(50, np.uint8)).replace(b"(50,), }", b"(9**9,)}"),
        "cannot be read",
    ),
    "floats": (ndarray_to_bytes(np.zeros(50, np.float32)), "got float32 of shape (50,)"),
}
"""What travels instead of the array that holds the buffer."""
