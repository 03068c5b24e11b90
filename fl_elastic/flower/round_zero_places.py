"""Choose where the head reads before round zero: a few clients send samples, and the server ranks places."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST
from fl_elastic.closed_form.trusted_sums import sizes_about_the_middle
from fl_elastic.errors import UpdateError
from fl_elastic.flower.records import TrainReply
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.flower.tasks.task import of_most, read_answers
from fl_elastic.readout.best_places import Choice, Sample
from fl_elastic.readout.best_reading import choose_reading
from fl_elastic.readout.place import BODY, HEAD, MOST_FEATURES, Place, Reading
from fl_elastic.readout.places_wire import PlacesReply, decode_places
from fl_elastic.update.manifest import PROJECTION, READ_FROM, Manifest, WeightDict

_LOG = logging.getLogger("fl_elastic")
LARGEST_BELIEVED = 100.0
"""A client whose mean square exceeds that of the median client by more than this factor is left out."""
# An example weighs at most as much as this number of usual ones.
_LARGER = 3.0
# Most clients that are asked about places, and places whose errors are logged.
_MOST_ASKED, _SHOWN = 16, 8


def asked_of(messages: Sequence[Message]) -> list[Message]:
    """Return new messages to some of these messages' nodes, spread evenly over them."""
    order = sorted(messages, key=lambda message: message.metadata.dst_node_id)
    count = min(len(order), _MOST_ASKED)
    asked = [order[number * len(order) // count] for number in range(count)]
    # New messages, because later requests need messages of their own.
    return [Message(each.content, each.metadata.dst_node_id, "train") for each in asked]


def with_chosen_places(
    replies: Iterable[Message],
    weights: Mapping[str, NDArray[Any]],
    manifest: Manifest,
    record: RoundRecord,
    read: str,
    examples: int,
) -> WeightDict:
    """Return the weights of a model that ends where its head reads best; unchanged if that is the last layer.

    Parameters
    ----------
    replies : iterable of Message
        Replies to `fl_elastic.flower.tasks.rank_places.RankPlaces`.
    weights : mapping of str to array
        The model.
    manifest : Manifest
        Manifest of the model.
    record : RoundRecord
        Gets the clients whose samples were used, and those that were left out.
    read : str
        ``auto`` or names of the places, as `fl_elastic.readout.place.Reading` parses it.
    examples : int
        Number of examples that each client was asked for.
    """
    left_out = partial(record.leave_out, what="choosing where to read")
    # Sorted by node, so that the order of arrival does not change which examples are held out together.
    read_in = sorted(_read(replies, manifest, record, left_out, examples), key=lambda each: each[0])
    found = _alike(read_in, left_out)
    found, samples = _believed(found, left_out)
    if not found:
        _LOG.warning(
            "no client sent samples for choosing a place: the head reads the input of the last layer"
        )
        return dict(weights)
    try:
        sample = Sample.together(samples)
        record.ranked_features = sum(rows.shape[1] for rows in sample.rows.values())
        # Places that are read together must be affordable together.
        most = min(MOST_FEATURES, *(reply.most for _, reply in found))
        chosen = choose_reading(sample, Reading.parse(read), most_features=most)
    except UpdateError as error:
        _LOG.warning("%s; the head reads the input of the last layer", error)
        return dict(weights)
    if chosen.choice is not None:
        _log(chosen.choice, sample, found)
    first = found[0][1]
    reading, directions = chosen.reading, chosen.directions
    places = reading.places
    if reading.is_at(first.last):
        return dict(weights)
    kept = sorted({each for place in places for each in first.kept[place]})
    features, projection = sum(sample.rows[place].shape[1] for place in places), {}
    if directions is not None:
        features = len(directions.matrix)
        projection = {
            f"{PROJECTION}.exponents": directions.exponents,
            f"{PROJECTION}.matrix": directions.matrix,
        }
    name = np.frombuffer(str(reading).encode(), dtype=np.uint8).copy()
    # Features have the dtype of the model, and so has the head that reads them.
    kind = next(
        (weight.dtype for weight in weights.values() if weight.dtype.kind == "f"), np.float32
    )
    # In the order of the tensors of a Readout.
    return (
        {READ_FROM: name}
        | {f"{BODY}.{manifest.names[each]}": weights[manifest.names[each]] for each in kept}
        | projection
        | {
            f"{HEAD}.weight": np.zeros((sample.targets.shape[1], features), kind),
            f"{HEAD}.bias": np.zeros(sample.targets.shape[1], kind),
        }
    )


def _log(choice: Choice, sample: Sample, found: list[tuple[int, PlacesReply]]) -> None:
    """Log the error at each place."""
    seconds = {
        place: max(reply.seconds.get(place, 0.0) for _, reply in found)
        for place in choice.best.places
    }
    _LOG.info(
        "the head reads %s: squared error %.2f of the mean's on held-out ones of %d examples of %d clients, "
        "%d features, %.3g ms an example on the slowest of them",
        choice.best.name, choice.best.error, round(sample.num_examples), len(found),
        choice.best.features, 1e3 * max(seconds.values()),
    )  # fmt: skip
    for worth in (*choice.unions[1:], *choice.single[:_SHOWN]):
        _LOG.info("  %.3f with %d features from %s", worth.error, worth.features, worth.name)


def _read(
    replies: Iterable[Message],
    manifest: Manifest,
    record: RoundRecord,
    left_out: Callable[[int, str], None],
    examples: int,
) -> Iterable[tuple[int, PlacesReply]]:
    def decode(reply: TrainReply) -> PlacesReply:
        found = decode_places(reply.packed, manifest)
        rows = len(found.sample.constant)
        if rows > examples:
            raise UpdateError(f"it sent {rows} examples, and was asked for {examples}")
        return found

    for node, reply, found in read_answers(replies, decode, left_out):
        record.accepted.append(
            AcceptedReply(
                node, {}, round(found.sample.num_examples), len(reply.packed),
                reply.metrics,
            )
        )  # fmt: skip
        yield node, found


def _alike(
    found: list[tuple[int, PlacesReply]], left_out: Callable[[int, str], None]
) -> list[tuple[int, PlacesReply]]:
    """Return the replies whose features, outputs and tensors agree with most clients', at the places they share."""

    def shape(reply: PlacesReply) -> tuple[object, ...]:
        return reply.sample.targets.shape[1], reply.classes, reply.last

    kept = of_most(
        found,
        lambda each: shape(each[1]),
        lambda each: left_out(
            each[0], f"its {each[1].sample.targets.shape[1]} outputs are not those of most clients"
        ),
    )
    named = Counter(place for _, reply in kept for place in reply.sample.rows)
    usual = {place for place, count in named.items() if 2 * count > len(kept)}
    for node, reply in kept:
        if usual.isdisjoint(reply.sample.rows):
            left_out(node, "it has none of the places that most clients have")
    kept = [each for each in kept if not usual.isdisjoint(each[1].sample.rows)]
    kinds = {
        place: Counter(
            (reply.sample.rows[place].shape[1], reply.kept[place])
            for _, reply in kept
            if place in reply.sample.rows
        )
        for _, first in kept
        for place in first.sample.rows
    }
    # No head can read a place where clients have different numbers of features, as with inputs of different sizes.
    widths = {
        place: kind
        for place, counts in kinds.items()
        for kind, count in counts.most_common(1)
        if 2 * count > counts.total()
    }
    kept = [(node, reply.at(widths)) for node, reply in kept]
    return [(node, reply) for node, reply in kept if _agrees(node, reply, widths, left_out)]


def _believed(
    found: list[tuple[int, PlacesReply]], left_out: Callable[[int, str], None]
) -> tuple[list[tuple[int, PlacesReply]], list[Sample]]:
    """Return the replies with numbers of a plausible size, and their samples; unusually large ones weigh less."""
    sizes = sizes_of_samples([reply.sample for _, reply in found])
    for (node, _), size in zip(found, sizes, strict=True):
        if size > LARGEST_BELIEVED:
            left_out(node, f"its numbers are {size**0.5:.3g} times as large as usual")
    kept = [each for each, size in zip(found, sizes, strict=True) if size <= LARGEST_BELIEVED]
    return kept, weighed([reply.sample for _, reply in kept], sizes[sizes <= LARGEST_BELIEVED])


def _agrees(
    node: int,
    reply: PlacesReply,
    usual: Mapping[Place, tuple[int, tuple[int, ...]]],
    left_out: Callable[[int, str], None],
) -> bool:
    if not reply.sample.rows:
        left_out(node, "it has no place at which most clients have the same number of features")
    for place, rows in reply.sample.rows.items():
        if (rows.shape[1], reply.kept[place]) != usual[place]:
            left_out(
                node, f"its place {place} with {rows.shape[1]} features is not that of most clients"
            )
            return False
    return bool(reply.sample.rows)


def sizes_of_samples(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Return for each client the largest ratio of its mean square to that of the median client.

    There is a ratio for the features of each place that all clients have, and one for the targets. Numbers are
    centred at the median of the clients' means, and each feature counts equally.

    Examples
    --------
    >>> from fl_elastic.readout.place import Place
    >>> x = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 3.0]])
    >>> found = [Sample.of({Place("a", "flat"): k * x}, x, np.arange(3)) for k in (1, 1, 9)]
    >>> np.round(sizes_of_samples(found)).tolist()
    [1.0, 1.0, 465.0]
    """
    if len(samples) < FEWEST:
        return np.ones(len(samples))
    common = [place for place in samples[0].rows if all(place in sample.rows for sample in samples)]
    found = [_sizes(samples, [sample.rows[place] for sample in samples]) for place in common]
    found.append(_sizes(samples, [sample.targets for sample in samples]))
    return np.asarray(np.max(found, axis=0))


def weighed(samples: Sequence[Sample], sizes: NDArray[np.float64]) -> list[Sample]:
    """Return the samples, with smaller weights for those whose relative size exceeds `_LARGER`."""
    return [
        sample if size <= _LARGER else sample.times(_LARGER / size)
        for sample, size in zip(samples, sizes, strict=True)
    ]


def _sizes(samples: Sequence[Sample], rows: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    counts = np.array([sample.num_examples for sample in samples])[:, None]
    means = np.array([each.constant @ own for each, own in zip(samples, rows, strict=True)])
    squares = np.array([np.einsum("ij,ij->j", own, own) for own in rows]) / counts
    found = sizes_about_the_middle(means / counts, squares)
    median = float(np.median(found))
    return np.asarray(found / median) if median > 0 else np.ones(len(samples))
