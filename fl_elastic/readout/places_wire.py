"""Wire format of a client's sample for the choice of places: the principal axes of its folds in half precision."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.ridge import varies
from fl_elastic.errors import PlanError, UpdateError
from fl_elastic.readout.best_places import Sample
from fl_elastic.readout.place import Place
from fl_elastic.update.checks import check_count
from fl_elastic.update.frame import MessageKind, field, integers_field, pack, unpack
from fl_elastic.update.manifest import Manifest

_MOST_PLACES, _MOST_FEATURES, _MOST_ROWS = 256, 1 << 16, 1 << 12
_MOST, _MOST_MICROSECONDS = 1e30, 10**12
_LONGEST_NAME = 500
# Tolerance for counts that are computed from targets and constants in fp32.
_ROUNDED = 1e-3


@dataclass(frozen=True, eq=False)
class PlacesReply:
    """A client's reply about the places of its model that can be read.

    Attributes
    ----------
    sample : Sample
        The sample by which the places are ranked.
    seconds : dict of Place to float
        Time per example of a pass that ends at the place.
    kept : dict of Place to tuple of int
        The manifest's tensors, by index, in a model that ends at the place.
    classes : bool
        Whether targets are classes.
    last : str
        Name of the model's last linear layer; empty if it has none.
    most : int
        Largest number of features, of all places that are read together, whose sums the client can afford.
    """

    sample: Sample
    seconds: Mapping[Place, float]
    kept: Mapping[Place, tuple[int, ...]]
    classes: bool
    last: str
    most: int

    def at(self, places: Container[Place]) -> PlacesReply:
        """Return the reply reduced to these places."""
        rows = {place: array for place, array in self.sample.rows.items() if place in places}
        return replace(self, sample=replace(self.sample, rows=rows))


def sample_bytes(rows: int, features: int, outputs: int) -> int:
    """Return the size of a sample on the wire without its header; ``features`` is the total over all places."""
    return 4 * (2 * features + rows * (1 + outputs)) + 2 * rows * features


def encode_places(reply: PlacesReply, manifest: Manifest) -> bytes:
    """Return a reply as one buffer.

    The rows of a fold are its principal axes, see `fl_elastic.closed_form.folds.Fold.centred`.
    Features are standardised before they are written as fp16; targets travel as fp32.
    """
    sample = reply.sample
    order = np.argsort(sample.folds, kind="stable")
    counts = np.unique(sample.folds, return_counts=True)[1]
    ends = np.cumsum(counts)[:-1]

    def by_fold(rows: NDArray[np.floating]) -> list[NDArray[np.floating]]:
        return np.split(rows[order], ends)

    exact, standard = [], []
    for rows in sample.rows.values():
        mean = sample.constant @ rows / sample.num_examples
        centred = rows - np.outer(sample.constant, mean)
        scale = np.sqrt((centred**2).mean(axis=0))
        still = ~varies(scale, mean)
        centred[:, still], scale[still] = 0.0, 1.0
        scale = scale.astype("<f4")
        exact += [mean.astype("<f4"), scale]
        standard.append(by_fold((centred / scale).astype(np.float32)))
    constant, targets = by_fold(sample.constant[:, None]), by_fold(sample.targets)
    # All rows of a fold are rotated in the same way, which leaves sums over features and targets unchanged.
    axes = [
        np.linalg.eigh(sum(part @ part.T for part in parts))[1].T
        for parts in zip(*standard, constant, targets, strict=True)
    ]

    def turned(parts: list[NDArray[np.floating]]) -> NDArray[np.float64]:
        return np.concatenate([axis @ part for axis, part in zip(axes, parts, strict=True)])

    small = [turned(parts).astype("<f2") for parts in standard]
    exact += [turned(constant).astype("<f4"), turned(targets).astype("<f4")]
    header = {
        "manifest": manifest.hash,
        "places": [str(place) for place in sample.rows],
        "features": [rows.shape[1] for rows in sample.rows.values()],
        "microseconds": [round(1e6 * reply.seconds.get(place, 0.0)) for place in sample.rows],
        "kept": [_ranges(reply.kept.get(place, ())) for place in sample.rows],
        "folds": counts.tolist(),
        "outputs": sample.targets.shape[1],
        "classes": int(reply.classes),
        "last": reply.last,
        "most": reply.most,
    }
    return pack(MessageKind.PLACES, header, [each.tobytes() for each in (*exact, *small)])


def decode_places(data: bytes | memoryview, manifest: Manifest) -> PlacesReply:
    """Return the reply in ``data``.

    Raises
    ------
    UpdateError
        If the bytes are damaged, of another model, or implausible.
    """
    _, header, payload = unpack(data, manifest, MessageKind.PLACES)
    names = field(header, "places", list)
    features, counts = integers_field(header, "features"), integers_field(header, "folds")
    outputs = field(header, "outputs", int)
    micro = integers_field(header, "microseconds")
    check_count("places", len(names), 1, _MOST_PLACES)
    check_count("outputs", outputs, 1, _MOST_FEATURES)
    if not len(names) == len(features) == len(micro) == len(field(header, "kept", list)):
        raise UpdateError("header names places without their features, time and tensors")
    for each in features:
        check_count("features of a place", each, 1, _MOST_FEATURES)
    for count in counts:
        check_count("rows of a fold", count, 1, _MOST_ROWS)
    for each in micro:
        check_count("microseconds", each, 0, _MOST_MICROSECONDS)
    rows = sum(counts)
    check_count("rows", rows, 1, _MOST_ROWS)
    exact = 2 * sum(features) + rows * (1 + outputs)
    needed = sample_bytes(rows, sum(features), outputs)
    if len(payload) != needed:
        raise UpdateError(f"payload has {len(payload)} bytes, places need {needed}")
    numbers = _finite(payload[: 4 * exact], "<f4")
    standard = _finite(payload[4 * exact :], "<f2")
    constant = numbers[2 * sum(features) :][:rows]
    targets = numbers[2 * sum(features) + rows :].reshape(rows, outputs)
    found: dict[Place, NDArray[np.floating]] = {}
    seconds: dict[Place, float] = {}
    kept: dict[Place, tuple[int, ...]] = {}
    start = 0
    for number, (name, width) in enumerate(zip(names, features, strict=True)):
        place = _place(name)
        if place in found:
            raise UpdateError(f"place {name!r} is listed twice")
        mean, scale = numbers[2 * start :][:width], numbers[2 * start + width :][:width]
        own = standard[rows * start :][: rows * width].reshape(rows, width)
        found[place] = own * scale + np.outer(constant, mean)
        seconds[place] = micro[number] / 1e6
        kept[place] = _indices(header["kept"][number], len(manifest))
        start += width
    folds = np.repeat(np.arange(len(counts)), counts)
    classes = bool(field(header, "classes", int))
    _check_examples(constant, targets, counts, classes)
    sample = Sample(found, constant, targets, folds, np.zeros(rows, np.int64))
    last = field(header, "last", str)[:_LONGEST_NAME]
    most = field(header, "most", int)
    check_count("features that can be afforded", most, 1, _MOST_FEATURES)
    return PlacesReply(sample, seconds, kept, classes, last, most)


def _check_examples(
    constant: NDArray[np.float64], targets: NDArray[np.float64], counts: list[int], classes: bool
) -> None:
    """Raise UpdateError unless the rows of each fold can be examples multiplied by a rotation.

    A rotation preserves the number of examples and, for classes, the number in each class and the fact that no
    example is in two classes.
    """
    start = 0
    for count in counts:
        ones, own = constant[start : start + count], targets[start : start + count]
        start += count
        most = _ROUNDED * count
        if abs(ones @ ones - count) > most:
            raise UpdateError(f"{count} rows of a fold represent {ones @ ones:.4g} examples")
        if classes:
            each = ones @ own
            # Products of targets with each other, of which there may be many, minus the diagonal matrix of `each`.
            products = own.T @ own if own.shape[1] <= count else own @ own.T
            apart = (products**2).sum() - 2 * (own**2).sum(axis=0) @ each + each @ each
            if abs(each.sum() - count) > most or apart > most**2:
                raise UpdateError("targets of a fold are not each in one class")


def _finite(payload: memoryview, kind: str) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        numbers = np.frombuffer(payload, kind).astype(np.float64)
    if not np.isfinite(numbers).all() or np.abs(numbers).max(initial=0.0) > _MOST:
        raise UpdateError(f"places hold numbers that are not finite, or larger than {_MOST:g}")
    return numbers


def _place(name: Any) -> Place:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable():
        raise UpdateError(f"{str(name)[:40]!r} is not a valid name of a place")
    try:
        return Place.parse(name)
    except PlanError as error:
        raise UpdateError(str(error)) from None


def _ranges(indices: tuple[int, ...]) -> list[int]:
    """Return increasing numbers as bounds of runs: begin, end, begin, end.

    >>> _ranges((0, 1, 2, 5))
    [0, 3, 5, 6]
    """
    bounds: list[int] = []
    for index in indices:
        if bounds and bounds[-1] == index:
            bounds[-1] = index + 1
        else:
            bounds += [index, index + 1]
    return bounds


def _indices(bounds: Any, most: int) -> tuple[int, ...]:
    """Return the numbers in the runs with these bounds."""
    whole = isinstance(bounds, list) and all(type(bound) is int for bound in bounds)
    if not whole or len(bounds) % 2 or sorted(bounds) != bounds:
        raise UpdateError("header's kept tensors are no runs of indices")
    if bounds and not 0 <= bounds[0] <= bounds[-1] <= most:
        raise UpdateError(f"kept tensors are outside the manifest's {most}")
    return tuple(
        each
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True)
        for each in range(begin, end)
    )
