"""Wire format of a model's weights: the whole model, or the tensors that changed since a version.

A message of changed tensors contains the version from which it starts, and the CRC-32 of the whole model's payload.
The receiver packs its updated model and compares: if its model differs from the sender's (another branch of the
federation after a restart, another codec in an earlier message), the message is refused.

If there is a frozen base, which is not sent, the message contains its digest, which is compared too.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StaleModelError, UpdateError
from fl_elastic.update.checks import MAX_VERSION, check_count
from fl_elastic.update.codecs.base import CODECS, Codec
from fl_elastic.update.frame import MessageKind, codec_field, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest, Role, Weights


def encode_weights(
    weights: Weights,
    manifest: Manifest,
    *,
    version: int = 0,
    codec: str = "fp32",
    since: int | None = None,
    names: Collection[str] | None = None,
) -> bytes:
    """Return a model as one buffer; integer buffers are written in their own dtype.

    Parameters
    ----------
    weights : dict of str to ndarray
        The whole model.
    manifest : Manifest
        Manifest of the model.
    version : int
        Version of the model.
    codec : str
        Registered codec that is suitable for weights: fp32, fp16 or bf16.
    since : int, optional
        Version that the receiver has; ignored without ``names``.
    names : collection of str, optional
        Tensors that changed after version ``since``; only these are written. None for the whole model.

    Raises
    ------
    UpdateError
        If the weights do not fit the manifest or the codec, the codec is only suitable for changes, or ``names``
        are given without ``since``.
    """
    manifest.check_weights(weights)
    check_count("version", version, 0, MAX_VERSION)
    writer = _for_weights(CODECS.make(codec), codec)
    header: dict[str, Any] = {"manifest": manifest.hash, "codec": codec, "version": int(version)}
    if manifest.base:
        header["base"] = manifest.base
    tensors = list(_write(weights, manifest, writer))
    if names is None:
        return pack(MessageKind.WEIGHTS, header, tensors)
    unknown = sorted(str(name)[:80] for name in names if name not in manifest.index)
    if unknown:
        raise UpdateError(f"changed tensors {unknown[:3]} are not in the manifest {manifest.hash}")
    check_count("since, the version that the receiver has,", since, 0, version)
    indices = sorted(manifest.index[name] for name in set(names))
    header |= {"since": since, "indices": indices, "model": _checksum(tensors)}
    return pack(MessageKind.CHANGED_WEIGHTS, header, [tensors[index] for index in indices])


def decode_weights(
    data: bytes | memoryview, manifest: Manifest, known: tuple[Weights, int] | None = None
) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the model in ``data``, in the manifest's dtypes, and its version.

    Parameters
    ----------
    data : bytes
        Result of `encode_weights`.
    manifest : Manifest
        Manifest of the model.
    known : tuple, optional
        Weights and version that this side holds; not modified. A message of changed tensors needs them.

    Raises
    ------
    StaleModelError
        If only changed tensors were sent, and they do not turn the known model into the sender's: the full model is
        needed.
    UpdateError
        If the bytes are damaged, or belong to another model or frozen base.
    """
    kind, header, payload = unpack(data, manifest, MessageKind.WEIGHTS, MessageKind.CHANGED_WEIGHTS)
    if "base" in header:
        manifest.check_base(field(header, "base", str))
    version = field(header, "version", int)
    check_count("version", version, 0, MAX_VERSION)
    reader = _for_weights(codec_field(header), header["codec"])
    if kind is MessageKind.WEIGHTS:
        return _read(payload, manifest, list(manifest.names), reader), version
    since = field(header, "since", int)
    check_count("since", since, 0, version)
    checksum = field(header, "model", int)
    names = [manifest.names[index] for index in index_field(header, "indices", manifest)]
    changed = _read(payload, manifest, names, reader)
    weights = _known_weights(known, since, manifest)
    weights.update(changed)
    if checksum != _checksum(_write(weights, manifest, reader)):
        raise StaleModelError(
            f"the tensors changed since version {since} do not turn the model held here into the "
            "sender's: ask for the full model"
        )
    return weights, version


def _known_weights(
    known: tuple[Weights, int] | None, since: int, manifest: Manifest
) -> dict[str, NDArray[Any]]:
    """Return copies of the known weights; raise StaleModelError unless they are those of version ``since``."""
    if known is None:
        raise StaleModelError(
            f"got the tensors changed since version {since}, but no model is held here: "
            "ask for the full model"
        )
    weights, version = known
    if version != since:
        raise StaleModelError(
            f"got the tensors changed since version {since}, but version {version} is held here: "
            "ask for the full model"
        )
    try:
        manifest.check_weights(weights)
    except UpdateError as error:
        raise StaleModelError(f"{error}: ask for the full model") from None
    return {name: np.array(weights[name], manifest.array_dtype(name)) for name in manifest.names}


def _for_weights(codec: Codec, name: str) -> Codec:
    if not codec.for_weights:
        fit = ", ".join(each for each in CODECS.names() if CODECS.make(each).for_weights)
        raise UpdateError(f"codec {name!r} is for changes, not for a model's weights: use {fit}")
    return codec


def _checksum(tensors: Iterable[bytes]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor, checksum)
    return checksum


def _write(weights: Weights, manifest: Manifest, writer: Codec) -> Iterator[bytes]:
    """Yield the bytes of every tensor of the manifest, in order."""
    # The interface requires a generator; no codec for weights uses it.
    generator = np.random.default_rng(0)
    for name, role in zip(manifest.names, manifest.roles, strict=True):
        with np.errstate(over="ignore"):
            # Cast to the manifest's dtype first, because the receiver stores and packs this dtype.
            held = np.asarray(weights[name], dtype=manifest.array_dtype(name), order="C")
            values = held if role is Role.COUNTER else np.asarray(held, dtype=np.float32)
        if role is Role.COUNTER:
            yield values.astype(values.dtype.newbyteorder("<")).tobytes()
        else:
            yield writer.encode(values, generator)


def _read(
    payload: memoryview, manifest: Manifest, names: list[str], reader: Codec
) -> dict[str, NDArray[Any]]:
    weights: dict[str, NDArray[Any]] = {}
    offset = 0
    for name in names:
        shape, dtype = manifest.shape(name), manifest.array_dtype(name)
        counter = manifest.role(name) is Role.COUNTER
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
    return weights
