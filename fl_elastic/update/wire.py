"""The packed form of partial updates and of whole models: one buffer behind a versioned, checksummed header.

Layout, little-endian: magic ``FLEL``, format version (u16), kind (u8), zero (u8), header length (u32), CRC-32 of
header and payload (u32), header (JSON), payload. One buffer rather than one array per tensor, because the number of
arrays, not of bytes, is what Flower's transport pays for.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.update.codecs import make_codec
from fl_elastic.update.manifest import Manifest, Role
from fl_elastic.update.partial import (
    MAX_VERSION,
    Limits,
    PartialUpdate,
    check_count,
    check_update,
)
from fl_elastic.update.slices import Slices

__all__ = ["WIRE_VERSION", "decode", "decode_weights", "encode", "encode_weights"]

WIRE_VERSION = 2
_MAGIC = b"FLEL"
_PREFIX = struct.Struct("<4sHBBII")
_UPDATE, _WEIGHTS = 1, 2


def encode(update: PartialUpdate, manifest: Manifest, codec: str = "fp32") -> bytes:
    """Return ``update`` as one buffer; channels whose delta is wholly zero are left out.

    Raises
    ------
    UpdateError
        If the update does not fit the manifest or its numbers do not fit the codec.
    RegistryError
        If the codec is unknown.

    Examples
    --------
    >>> manifest = Manifest(("w",), ((2,),), ("float32",), (Role.PARAMETER,))
    >>> update = PartialUpdate({"w": np.ones(2, np.float32)}, {"w": 5}, num_examples=10, base_version=3)
    >>> decode(encode(update, manifest), manifest).deltas["w"].tolist()
    [1.0, 1.0]
    """
    check_update(update, manifest)
    writer = make_codec(codec)
    indices = sorted(manifest.index[name] for name in update.deltas)
    names = [manifest.names[index] for index in indices]
    header = {
        "manifest": manifest.hash,
        "codec": codec,
        "indices": indices,
        "steps": [int(update.steps[name]) for name in names],
        "num_examples": int(update.num_examples),
        "base_version": int(update.base_version),
    }
    deltas = [np.ascontiguousarray(update.deltas[name], dtype=np.float32) for name in names]
    slices = [Slices.of(delta) for delta in deltas]
    if any(found is not None for found in slices):
        header["slices"] = [None if found is None else found.to_header() for found in slices]
    payload = b"".join(
        writer.encode(delta if found is None else found.take(delta))
        for delta, found in zip(deltas, slices, strict=True)
    )
    return _pack(_UPDATE, header, payload)


def decode(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> PartialUpdate:
    """Return the partial update in ``data``.

    Raises
    ------
    UpdateError
        If the bytes are damaged or truncated, of another format version or model, or hold numbers that cannot
        be merged (see `check_update`).
    """
    header, payload = _unpack(_UPDATE, data, manifest)
    indices = _integers(header, "indices")
    steps = _integers(header, "steps")
    if any(b <= a for a, b in pairwise(indices)):
        raise UpdateError("tensor indices must be increasing")
    if indices and not 0 <= indices[0] <= indices[-1] < len(manifest):
        raise UpdateError(f"tensor index {indices[-1]} is outside the manifest's {len(manifest)}")
    if len(steps) != len(indices):
        raise UpdateError(f"{len(indices)} tensors but {len(steps)} step counts")
    names = [manifest.names[index] for index in indices]
    deltas = _read_tensors(header, payload, [(name, manifest.shape(name)) for name in names])
    update = PartialUpdate(
        deltas=deltas,
        steps=dict(zip(names, steps, strict=True)),
        num_examples=_field(header, "num_examples", int),
        base_version=_field(header, "base_version", int),
    )
    check_update(update, manifest, limits)
    return update


def encode_weights(
    weights: Mapping[str, NDArray[Any]],
    manifest: Manifest,
    *,
    version: int = 0,
    codec: str = "fp32",
) -> bytes:
    """Return a whole model as one buffer; integer buffers are written in their own dtype.

    Raises
    ------
    UpdateError
        If the weights do not fit the manifest or the codec.
    """
    manifest.check_weights(weights)
    writer = make_codec(codec)
    header = {"manifest": manifest.hash, "codec": codec, "version": int(version)}
    parts = []
    for name, role in zip(manifest.names, manifest.roles, strict=True):
        if role is Role.COUNTER:
            dtype = manifest.array_dtype(name).newbyteorder("<")
            parts.append(np.ascontiguousarray(weights[name]).astype(dtype).tobytes())
        else:
            parts.append(writer.encode(np.ascontiguousarray(weights[name], dtype=np.float32)))
    return _pack(_WEIGHTS, header, b"".join(parts))


def decode_weights(
    data: bytes | memoryview, manifest: Manifest
) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the model in ``data``, in the manifest's dtypes, and its version.

    Raises
    ------
    UpdateError
        If the bytes are damaged or belong to another model.
    """
    header, payload = _unpack(_WEIGHTS, data, manifest)
    weights: dict[str, NDArray[Any]] = {}
    reader = _codec_of(header)
    offset = 0
    for name, shape, role in zip(manifest.names, manifest.shapes, manifest.roles, strict=True):
        dtype = manifest.array_dtype(name)
        counter = role is Role.COUNTER
        count = int(np.prod(shape, dtype=np.int64))
        size = count * dtype.itemsize if counter else reader.size(shape)
        part = payload[offset : offset + size]
        if len(part) != size:
            raise UpdateError(f"payload ends within tensor {name!r}: the buffer is truncated")
        if counter:
            values = np.frombuffer(part, dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype)
        else:
            values = reader.decode(part, shape).astype(dtype, copy=False)
            if not np.isfinite(values).all():
                raise UpdateError(f"tensor {name!r} holds NaN or infinite values")
        weights[name] = values
        offset += size
    if offset != len(payload):
        raise UpdateError(f"payload has {len(payload)} bytes, expected {offset}")
    version = _field(header, "version", int)
    check_count("version", version, 0, MAX_VERSION)
    return weights, version


def _pack(kind: int, header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    checksum = zlib.crc32(payload, zlib.crc32(text))
    return _PREFIX.pack(_MAGIC, WIRE_VERSION, kind, 0, len(text), checksum) + text + payload


def _unpack(
    kind: int, data: bytes | memoryview, manifest: Manifest
) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise UpdateError(f"buffer of {len(view)} bytes is too short to hold a header")
    magic, version, seen_kind, zero, length, checksum = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != _MAGIC:
        raise UpdateError("buffer does not start with the mark of a packed update")
    if version != WIRE_VERSION:
        raise UpdateError(
            f"wire format version {version}, this side reads {WIRE_VERSION}: use one release everywhere"
        )
    if seen_kind != kind:
        raise UpdateError(f"buffer is of kind {seen_kind}, expected {kind}")
    if zero != 0:
        raise UpdateError(f"reserved byte is {zero}, expected 0: the buffer is damaged")
    body = view[_PREFIX.size :]
    if length > len(body) or zlib.crc32(body) != checksum:
        raise UpdateError("checksum does not fit: the buffer is truncated or damaged")
    try:
        header = json.loads(bytes(body[:length]))
    except (ValueError, RecursionError):
        raise UpdateError("header is not valid JSON") from None
    if not isinstance(header, dict):
        raise UpdateError("header is not a JSON object")
    seen = header.get("manifest")
    if seen != manifest.hash:
        raise UpdateError(
            f"manifest {str(seen)[:40]!r}, expected {manifest.hash!r}: "
            "the other side runs another model version"
        )
    return header, body[length:]


def _read_tensors(
    header: dict[str, Any], payload: memoryview, tensors: list[tuple[str, tuple[int, ...]]]
) -> dict[str, NDArray[Any]]:
    reader = _codec_of(header)
    slices = _slices(header, tensors)
    written = [
        shape if found is None else found.shape(shape)
        for (_, shape), found in zip(tensors, slices, strict=True)
    ]
    expected = sum(reader.size(shape) for shape in written)
    if expected != len(payload):
        raise UpdateError(f"payload has {len(payload)} bytes, its tensors need {expected}")
    deltas: dict[str, NDArray[Any]] = {}
    offset = 0
    for (name, whole), shape, found in zip(tensors, written, slices, strict=True):
        size = reader.size(shape)
        values = reader.decode(payload[offset : offset + size], shape)
        deltas[name] = values if found is None else found.put(values, whole)
        offset += size
    return deltas


def _slices(
    header: dict[str, Any], tensors: list[tuple[str, tuple[int, ...]]]
) -> list[Slices | None]:
    if "slices" not in header:
        return [None] * len(tensors)
    given = _field(header, "slices", list)
    if len(given) != len(tensors):
        raise UpdateError(f"{len(tensors)} tensors but {len(given)} entries of slices")
    return [
        Slices.from_header(value, shape) for value, (_, shape) in zip(given, tensors, strict=True)
    ]


def _codec_of(header: dict[str, Any]) -> Any:
    try:
        return make_codec(_field(header, "codec", str)[:40])
    except RegistryError as error:
        raise UpdateError(str(error)) from None


def _field(header: dict[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UpdateError(f"header field {name!r} is {str(value)[:40]!r}, expected {kind.__name__}")
    return value


def _integers(header: dict[str, Any], name: str) -> list[int]:
    values = _field(header, name, list)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise UpdateError(f"header field {name!r} must be a list of integers")
    return list(values)
