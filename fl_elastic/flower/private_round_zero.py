"""Private round zero: the sums have noise that hides single examples, or the server sees only their total."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST
from fl_elastic.closed_form.head import ClosedFormHead, closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import layer_shape
from fl_elastic.closed_form.secret_sums import FixedPoint, as_vector, of_vector, with_held_out
from fl_elastic.closed_form.sums_privacy import (
    SumsPrivacy,
    decode_noisy_sums,
    encode_noisy_sums,
    noised,
    private_head,
)
from fl_elastic.errors import UpdateError
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.flower.round_zero import Solved, bias_beside
from fl_elastic.flower.tasks.task import Answer, of_most, read_answers
from fl_elastic.update.manifest import Manifest, Weights

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.flower.tasks.solve_head import SolveHead


_LOG = logging.getLogger("fl_elastic")
SUMS_OF = "fl_elastic.sums-of"
"""Metric key under which a client names the layer and the kind of target of its sums; it reveals no data."""

# A client that claims more than this multiple of the median number of examples is left out.
_UNUSUAL = 10.0


def noisy_answer(work: ClientRound, task: SolveHead) -> Answer:
    """Return a client's sums of clipped features with noise, packed; its number of examples is kept secret."""
    total, _ = _sums_apart(work, task)
    if task.noise is None or task.clip is None:
        raise UpdateError("sums with noise need both clip and noise")
    # Seeded by the system's entropy: noise of a known seed could be subtracted.
    sums = noised(total, task.noise, np.random.default_rng())
    return Answer.packed(encode_noisy_sums(sums, work.data.manifest), 1)


def secret_answer(work: ClientRound, task: SolveHead) -> Answer:
    """Return a client's sums over all and over about a fifth of its examples, as numbers for secure aggregation."""
    fixed = FixedPoint.of_text(task.fixed_point)
    total, held = _sums_apart(work, task)
    index = work.data.manifest.index
    bias = total.weight.removesuffix("weight") + "bias"
    said = [index[total.weight], index.get(bias, -1), int(total.classes)]
    # Under differential privacy the sums of the fifth are not sent: they would need noise of their own.
    parts = [total] if task.clip is not None else [total, held]
    numbers = fixed.write(np.concatenate([as_vector(part) for part in parts]))
    return Answer([numbers], 1, {SUMS_OF: json.dumps(said)})


def _sums_apart(work: ClientRound, task: SolveHead) -> tuple[HeadSums, HeadSums]:
    """Return the sums over all examples and over about a fifth, with features clipped as the server says."""
    from fl_elastic.training.head_pass import sums_apart
    from fl_elastic.training.model_head import refuse_frozen_head

    data = work.data
    total, held = sums_apart(
        data.model, data.examples(of_server=True),
        seconds=work.budget.deadline or math.inf, loss_fn=data.loss_fn, clip=task.clip,
    )  # fmt: skip
    refuse_frozen_head(data.model, total.weight, data.manifest.index)
    return data.in_server_order(total), data.in_server_order(held)


def secret_head(
    said: Iterable[object],
    means: NDArray[Any],
    clients: int,
    fixed: FixedPoint,
    arrays: Sequence[NDArray[Any]],
    privacy: SumsPrivacy | None,
) -> tuple[dict[int, NDArray[Any]], ClosedFormHead, int]:
    """Return the head's tensors by their indices, the head itself, and the number of examples it is solved from.

    Parameters
    ----------
    said : iterable of object
        The clients' metrics under `SUMS_OF`.
    means : array
        Result of the secure aggregation workflow for the clients' arrays.
    clients : int
        Number of clients in the mean.
    fixed : FixedPoint
        Format of the numbers.
    arrays : sequence of array
        The model.
    privacy : SumsPrivacy, optional
        Differential privacy of the total.

    Raises
    ------
    UpdateError
        If clients name different layers, or the numbers cannot be sums over examples.
    """
    weight, bias, classes = _layer(said, arrays)
    shape = layer_shape(arrays[weight].shape)
    numbers = fixed.read(np.asarray(means, np.float64), clients)
    if privacy is None:
        total, held = (
            of_vector(each, "head.weight", shape, classes) for each in np.split(numbers, 2)
        )
        _refuse_impossible(total)
        head = closed_form_head(with_held_out(total, held), intercept=bias >= 0)
    else:
        total = of_vector(numbers, "head.weight", shape, classes)
        _refuse_impossible(total)
        noisy = noised(total, privacy.noise, np.random.default_rng())
        head = private_head(noisy, privacy.noise, privacy.clip, intercept=bias >= 0)
    found = {weight: head.weight.reshape(arrays[weight].shape).astype(arrays[weight].dtype)}
    if bias >= 0:
        found[bias] = head.bias.astype(arrays[bias].dtype)
    return found, head, total.num_examples


def with_private_head(
    replies: Iterable[Message],
    weights: Weights,
    manifest: Manifest,
    record: RoundRecord,
    holds: Callable[[int, int | None], None],
    privacy: SumsPrivacy,
) -> Solved:
    """Return the model with the head solved from the clients' noisy sums; unchanged if no client sent sums.

    Sums that cannot come from clipped examples plus noise are left out and logged. False sums within the clip
    cannot be told from noise.

    Parameters
    ----------
    replies, weights, manifest, record, holds
        See `fl_elastic.flower.round_zero.with_closed_form_head`.
    privacy : SumsPrivacy
        Clip and noise that clients were told to apply.
    """
    left_out = partial(record.leave_out, what="round zero")
    noise, found = privacy.noise, list[tuple[AcceptedReply, HeadSums]]()
    for node, reply, sums in read_answers(
        replies, lambda reply: decode_noisy_sums(reply.packed, manifest, noise), left_out, holds
    ):
        found.append((AcceptedReply(node, {}, 1, len(reply.packed), reply.metrics), sums))
    usual = median(float(each.products[-1, -1]) for _, each in found) if found else 0.0
    kept = []
    for accepted, sums in of_most(
        found,
        lambda each: each[1].weight,
        lambda each: left_out(
            each[0].node_id, f"sums for {each[1].weight!r}, not the layer of the others"
        ),
    ):
        count = float(sums.products[-1, -1])
        if len(found) >= FEWEST and count > _UNUSUAL * max(usual, noise):
            left_out(accepted.node_id, f"it claims {count:.0f} examples, the median is {usual:.0f}")
        else:
            kept.append((accepted, sums))
    if not kept:
        _LOG.warning("round zero: no client sent sums for a head; it stays as it is")
        return Solved(dict(weights))
    total, most = kept[0][1], kept[0][1].weight
    for _, sums in kept[1:]:
        total = total + sums
    head = private_head(
        total,
        noise * math.sqrt(len(kept)),
        privacy.clip,
        intercept=bool(bias_beside(most, manifest)),
    )
    record.accepted += [accepted for accepted, _ in kept]
    _LOG.info(
        "round zero: %s in closed form from about %d examples of %d clients, each of whose sums is "
        "(%g, %g)-differentially private",
        most, max(total.products[-1, -1], 0), len(kept), privacy.epsilon, privacy.delta,
    )  # fmt: skip
    nodes = frozenset(accepted.node_id for accepted, _ in kept)
    return Solved.with_head(weights, manifest, most, head, nodes)


def _layer(said: Iterable[object], arrays: Sequence[NDArray[Any]]) -> tuple[int, int, bool]:
    """Return the indices of weight and bias (-1 without a bias), and whether targets are classes."""
    texts = {str(each) for each in said}
    if len(texts) != 1:
        raise UpdateError(f"clients name {len(texts)} different layers for their sums")
    try:
        weight, bias, classes = map(int, json.loads(texts.pop()))
        outputs = arrays[weight].shape[:1]
        if weight < 0 or bias < -1 or (bias >= 0 and arrays[bias].shape != outputs):
            raise IndexError("no layer of the model")
    except (ValueError, TypeError, OverflowError, IndexError, RecursionError) as error:
        raise UpdateError(f"clients do not say of which layer their sums are: {error}") from None
    return weight, bias, bool(classes)


def _refuse_impossible(total: HeadSums) -> None:
    """Raise UpdateError for a total that no set of examples can have, as after a false report of one client."""
    examples, own = float(total.products[-1, -1]), np.diag(total.products)[:-1]
    scale = np.sqrt(np.maximum(own, 1e-9))
    correlations = total.products[:-1, :-1] / np.outer(scale, scale)
    if examples < 1 or own.min(initial=0.0) < -1e-3 or np.abs(correlations).max(initial=0.0) > 1.01:
        raise UpdateError("the total of all clients cannot be a sum over examples")
    if total.classes and abs(float(total.targets[-1].sum()) - examples) > 1e-3 * examples:
        raise UpdateError("the total of all clients does not count each example in one class")
