"""Whether slow devices hold other data than fast ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.data.partition import Indices, partition_indices

__all__ = ["LAYOUTS", "correlated_labels", "correlated_owners"]

LAYOUTS = ("independent", "correlated")
_EXCLUSIVE = 0.4


def correlated_labels(
    labels: npt.ArrayLike,
    slowdowns: Sequence[float],
    *,
    alpha: float,
    seed: int,
    min_examples: int,
) -> list[Indices]:
    """Deal four labels in ten to the slower half of the clients alone, the others to everyone.

    Parameters
    ----------
    labels : array of int
        The class of each example.
    slowdowns : sequence of float
        One per client; those above the median are the slow ones.
    alpha, seed, min_examples
        As in `partition_indices`; both groups of labels are dealt from Dirichlet(alpha).

    Raises
    ------
    ScenarioError
        If all clients are equally fast.

    Examples
    --------
    >>> parts = correlated_labels([0, 1, 2, 3, 4] * 20, [1, 1, 4, 4], alpha=1.0, seed=0, min_examples=1)
    >>> fast = {int(i) % 5 for part in parts[:2] for i in part}
    >>> len(fast)
    3
    """
    label_array, slow = np.asarray(labels), _slow(slowdowns)
    names = np.random.default_rng([seed, 1]).permutation(np.unique(label_array))
    exclusive = np.isin(label_array, names[: round(_EXCLUSIVE * len(names))])
    common, rare = np.flatnonzero(~exclusive), np.flatnonzero(exclusive)
    parts = [
        common[part]
        for part in partition_indices(
            label_array[common], len(slowdowns),
            method="dirichlet", alpha=alpha, seed=seed, min_examples=min_examples,
        )
    ]  # fmt: skip
    dealt = partition_indices(
        label_array[rare], len(slow), method="dirichlet", alpha=alpha, seed=seed, min_examples=0
    )
    for client, part in zip(slow, dealt, strict=True):
        parts[client] = np.sort(np.concatenate([parts[client], rare[part]]))
    return parts


def correlated_owners(
    inputs: npt.NDArray[np.floating],
    owners: npt.ArrayLike,
    slowdowns: Sequence[float],
    *,
    min_examples: int,
) -> list[Indices]:
    """Deal whole owners to clients so that those who are most unlike the rest come to the slow ones.

    Owners are put in the order of the first principal component of their mean inputs, clients in the order of
    their speed, and each client takes the next owners until it has its share of them.

    Parameters
    ----------
    inputs : array, shape (examples, ...)
        What was recorded.
    owners : array of int
        By whom.
    slowdowns : sequence of float
        One per client.
    min_examples : int
        Size of the smallest client.

    Raises
    ------
    ScenarioError
        If there are fewer owners than clients, or a client would get too few examples.
    """
    owner_array = np.asarray(owners)
    names = np.unique(owner_array)
    if len(names) < len(slowdowns):
        raise ScenarioError(
            f"{len(names)} owners cannot be dealt to {len(slowdowns)} clients: use at most {len(names)}"
        )
    means = np.stack([inputs[owner_array == name].mean(axis=0).ravel() for name in names])
    centred = means - means.mean(axis=0)
    component = np.linalg.svd(centred, full_matrices=False)[0][:, 0]
    # The sign of a component is arbitrary: the more distant end is the unlike one.
    along = names[np.argsort(component if component.max() > -component.min() else -component)]
    by_speed = np.argsort(slowdowns, kind="stable")
    parts: list[Indices] = [np.empty(0, dtype=np.int64)] * len(slowdowns)
    for client, mine in zip(by_speed, np.array_split(along, len(slowdowns)), strict=True):
        parts[client] = np.flatnonzero(np.isin(owner_array, mine)).astype(np.int64)
    smallest = min(len(part) for part in parts)
    if smallest < min_examples:
        raise ScenarioError(
            f"whole owners leave a client with {smallest} examples, below min_examples {min_examples}: "
            "lower min_examples or the number of clients"
        )
    return parts


def _slow(slowdowns: Sequence[float]) -> list[int]:
    middle = float(np.median(slowdowns))
    slow = [client for client, slowdown in enumerate(slowdowns) if slowdown > middle]
    if not slow and max(slowdowns) > min(slowdowns):
        slow = [c for c, slowdown in enumerate(slowdowns) if slowdown == max(slowdowns)]
    if not slow:
        raise ScenarioError(
            "a correlated layout needs devices of unequal speed: all clients are equally fast"
        )
    return slow
