"""Wire format of partial updates.

The header of `fl_elastic.update.frame` names the codec, the tensors (``indices`` into the manifest) and their step
counts. If not every number is written with the codec, it also names the written part of each tensor (``slices``,
see `fl_elastic.update.parts`) and the tensors written as fp32 (``exact``). The payload holds the tensors one after
the other.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.checks import Limits, check_update
from fl_elastic.update.codecs.base import CODECS, Codec, Fp32, Memory, number_of
from fl_elastic.update.frame import (
    MessageKind,
    codec_field,
    field,
    index_field,
    integers_field,
    pack,
    unpack,
)
from fl_elastic.update.manifest import Manifest, Role
from fl_elastic.update.partial import PackedDeltas, PartialUpdate
from fl_elastic.update.parts import Slices


def encode(update: PartialUpdate, manifest: Manifest, codec: str = "fp32") -> bytes:
    """Return ``update`` as one buffer.

    For a tensor that was partly trained, only the trained part is written. For other tensors, slices of zeros are
    left out, unless the codec is sparse itself.

    Parameters
    ----------
    update : PartialUpdate
        The update to write.
    manifest : Manifest
        Manifest of the global model.
    codec : str
        Registered codec. Running statistics are written as fp32 if the codec is too coarse for them.

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
    coarse = CODECS.make(codec)
    # Seeded from the update, so that the same update always gives the same bytes, while updates of different
    # clients and rounds are rounded independently, and errors cancel.
    generator = np.random.default_rng(_seed_of(update) if coarse.lossy and coarse.unbiased else 0)
    indices = sorted(manifest.index[name] for name in update.deltas)
    names = [manifest.names[index] for index in indices]
    header: dict[str, Any] = {
        "manifest": manifest.hash,
        "codec": codec,
        "indices": indices,
        "steps": [int(update.steps[name]) for name in names],
        "num_examples": int(update.num_examples),
        "base_version": int(update.base_version),
    }
    statistics = {index for index in indices if manifest.roles[index] is Role.STATISTIC}
    exact = set() if coarse.for_statistics else statistics
    if exact:
        header["exact"] = sorted(exact)
    deltas = [np.asarray(update.deltas[name], dtype=np.float32, order="C") for name in names]
    writers = _codecs(indices, exact, coarse)
    slices = [
        _slices_of(update, name, delta, writer)
        for name, delta, writer in zip(names, deltas, writers, strict=True)
    ]
    if any(found is not None for found in slices):
        header["slices"] = [None if found is None else found.to_header() for found in slices]
    payload = [
        writer.encode(delta if found is None else found.take(delta), generator)
        for writer, delta, found in zip(writers, deltas, slices, strict=True)
    ]
    return pack(MessageKind.UPDATE, header, payload)


def decode(
    data: bytes | memoryview,
    manifest: Manifest,
    limits: Limits | None = None,
    *,
    in_place: bool = False,
    memory: Memory | None = None,
) -> PartialUpdate:
    """Return the partial update in ``data``.

    Parameters
    ----------
    data : bytes or memoryview
        The buffer.
    manifest : Manifest
        Manifest of the global model.
    limits : Limits, optional
        Counts that the server accepts.
    in_place : bool
        Whether the deltas may be views of the buffer, which the caller then must not use; they are writable only if
        the buffer is. By default they have memory of their own.
    memory : callable, optional
        ``memory(size)`` returns an array of ``size`` float32 for deltas that cannot be views of the buffer; by
        default a new one.

    Raises
    ------
    UpdateError
        If the bytes are damaged or truncated, of another format version or model, or hold numbers that cannot
        be merged (see `check_update`).
    """
    _, header, payload = unpack(data, manifest, MessageKind.UPDATE)
    indices = index_field(header, "indices", manifest)
    steps = integers_field(header, "steps")
    if len(steps) != len(indices):
        raise UpdateError(f"{len(indices)} tensors but {len(steps)} step counts")
    names = [manifest.names[index] for index in indices]
    slices = _read_slices(header, [manifest.shape(name) for name in names])
    codecs = _codecs(indices, _read_exact(header, indices, manifest), codec_field(header))
    update = PartialUpdate(
        deltas=_read_deltas(
            payload if in_place else _copied(payload),
            manifest,
            names,
            codecs,
            slices,
            memory or (lambda size: np.empty(size, np.float32)),
        ),
        steps=dict(zip(names, steps, strict=True)),
        num_examples=field(header, "num_examples", int),
        base_version=field(header, "base_version", int),
        parts={
            name: found.masks
            for name, found in zip(names, slices, strict=True)
            if found is not None and found.trained
        },
    )
    check_update(update, manifest, limits)
    return update


def _seed_of(update: PartialUpdate) -> int:
    """Return a seed that differs between clients and rounds, as their deltas do."""
    digest = hashlib.blake2b(f"{update.base_version} {update.num_examples}".encode(), digest_size=8)
    for name in sorted(update.deltas):
        numbers = np.ascontiguousarray(update.deltas[name], np.float32).reshape(-1)
        digest.update(np.uint32(zlib.crc32(numbers.view(np.uint8).data)).tobytes())
    return int.from_bytes(digest.digest())


def _codecs(indices: list[int], exact: set[int], coarse: Codec) -> list[Codec]:
    return [Fp32() if index in exact else coarse for index in indices]


def _slices_of(
    update: PartialUpdate, name: str, delta: NDArray[np.float32], writer: Codec
) -> Slices | None:
    if name in update.parts:
        return Slices(update.parts[name], trained=True)
    return None if writer.sparse else Slices.of(delta)


def _read_exact(header: dict[str, Any], indices: list[int], manifest: Manifest) -> set[int]:
    # Listed in the message, because roles are not part of the hash, and the two sides may assign different ones.
    if "exact" not in header:
        return set()
    exact = set(index_field(header, "exact", manifest))
    if not exact <= set(indices):
        raise UpdateError("the header lists tensors written as fp32 that are not in the update")
    return exact


def _read_slices(header: dict[str, Any], shapes: list[tuple[int, ...]]) -> list[Slices | None]:
    if "slices" not in header:
        return [None] * len(shapes)
    given = field(header, "slices", list)
    if len(given) != len(shapes):
        raise UpdateError(f"{len(shapes)} tensors but {len(given)} entries of slices")
    return [Slices.from_header(value, shape) for value, shape in zip(given, shapes, strict=True)]


def _read_deltas(
    payload: memoryview,
    manifest: Manifest,
    names: list[str],
    codecs: list[Codec],
    slices: list[Slices | None],
    memory: Memory,
) -> PackedDeltas:
    written = [
        manifest.shape(name) if found is None else found.shape(manifest.shape(name))
        for name, found in zip(names, slices, strict=True)
    ]
    sizes = [codec.size(shape) for codec, shape in zip(codecs, written, strict=True)]
    if sum(sizes) != len(payload):
        raise UpdateError(f"payload has {len(payload)} bytes, its tensors need {sum(sizes)}")
    flat = codecs[0].decode_together(payload, memory) if len(set(map(type, codecs))) == 1 else None
    if flat is None:
        flat = memory(sum(map(number_of, written)))
        start = offset = 0
        for codec, shape, size in zip(codecs, written, sizes, strict=True):
            into = flat[start : start + number_of(shape)].reshape(shape)
            codec.decode_into(payload[offset : offset + size], into)
            start, offset = start + into.size, offset + size
    return _laid_out(flat, manifest, names, written, slices)


def _copied(payload: memoryview) -> memoryview:
    # One copy of all numbers instead of one per tensor, so that the memory of servers that read thousands of
    # updates is not fragmented.
    return memoryview(np.frombuffer(payload, np.uint8).copy().data).cast("B")


def _laid_out(
    flat: NDArray[np.float32],
    manifest: Manifest,
    names: list[str],
    written: list[tuple[int, ...]],
    slices: list[Slices | None],
) -> PackedDeltas:
    """Return the deltas of tensors that were written one after the other."""
    deltas = PackedDeltas(flat)
    start = 0
    for name, shape, found in zip(names, written, slices, strict=True):
        stop = start + number_of(shape)
        if found is None:
            deltas.lay(name, start, shape)
        else:
            deltas[name] = found.put(flat[start:stop].reshape(shape), manifest.shape(name))
        start = stop
    return deltas
