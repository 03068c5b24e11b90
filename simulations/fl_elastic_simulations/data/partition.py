"""Partitions: split a dataset over clients, independently of their speed or with labels only slow devices hold.

flwr-datasets is not used: version 0.6.1 was tried with flwr 1.41 and numpy 2.4. Its DirichletPartitioner and
NaturalIdPartitioner work without a network on arrays in memory, but only wrapped in a Hugging Face
``datasets.Dataset``. It brings 26 packages that nothing else here needs (datasets, pyarrow, pandas, matplotlib,
seaborn, aiohttp, ...), 376 MB on disk. It raises an exception if ``min_partition_size`` is not met after ten draws,
which is usual for small ``alpha``, and its natural partitioner makes one partition per owner, so that the number of
clients cannot be chosen. The functions below only need numpy, always end, and respect the minimum size of a client.
If flwr-datasets is installed, its partitioners can still be named, see `own_partition`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import ScenarioError
from fl_elastic.registry import closest, or_own

Indices = npt.NDArray[np.int64]

PARTITIONS = ("dirichlet", "iid", "natural", "pathological")
DRAWS = 50


def check_partition_name(name: str) -> None:
    """Raise ScenarioError unless ``name`` is a known partition, or ``module:callable``, which is not imported."""
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute) and name not in PARTITIONS:
        raise ScenarioError(
            f"unknown partition {name!r}{closest(name, list(PARTITIONS))}: "
            f"known are {', '.join(PARTITIONS)}{or_own(name)}"
        )


def partition_indices(
    labels: npt.ArrayLike,
    clients: int,
    *,
    method: str,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    seed: int = 0,
    min_examples: int = 1,
    owners: npt.ArrayLike | None = None,
) -> list[Indices]:
    """Split the indices of a dataset over clients; every index goes to exactly one client.

    Parameters
    ----------
    labels : array of int
        The class of each example.
    clients : int
        Number of parts.
    method : str
        ``iid``: a random split into equal parts. ``dirichlet``: each class is divided in proportions
        drawn from Dirichlet(alpha), as in Hsu et al. 2019 ("Measuring the effects of non-identical data
        distribution"), redrawn until every client has ``min_examples``; after 50 draws the best one is
        repaired by moving examples from the largest clients. ``natural``: whole owners are assigned to
        clients so that the sizes balance. ``pathological``: every client has the same number of classes,
        and the clients with a class share it evenly, as in McMahan et al. 2017 and HeteroFL.
    classes_per_client : int
        Number of classes of each client, for ``pathological``.
    alpha : float
        Parameter of ``dirichlet``: a large value resembles ``iid``, 0.1 leaves most clients with one or two
        classes.
    seed : int
        Determines the split.
    min_examples : int
        Number of examples of the smallest client.
    owners : array of int, optional
        Owner of each example, for ``natural``.

    Raises
    ------
    ScenarioError
        If the split is not possible.

    Examples
    --------
    >>> parts = partition_indices([0, 0, 1, 1, 2, 2], 3, method="iid", seed=0)
    >>> sorted(int(index) for part in parts for index in part)
    [0, 1, 2, 3, 4, 5]
    """
    label_array = np.asarray(labels)
    if clients * min_examples > len(label_array):
        raise ScenarioError(
            f"{len(label_array)} examples are too few for {clients} clients with at least "
            f"{min_examples} each: lower min_examples or the number of clients"
        )
    rng = np.random.default_rng(seed)
    if method == "iid":
        parts = _iid(len(label_array), clients, rng)
    elif method == "dirichlet":
        parts = _dirichlet(label_array, clients, alpha, min_examples, rng)
    elif method == "pathological":
        parts = _pathological(label_array, clients, classes_per_client, min_examples, rng)
    else:
        parts = _natural(owners, len(label_array), clients, min_examples, rng)
    return [np.sort(part) for part in parts]


def _iid(examples: int, clients: int, rng: np.random.Generator) -> list[Indices]:
    return [
        part.astype(np.int64, copy=False)
        for part in np.array_split(rng.permutation(examples), clients)
    ]


def _dirichlet(
    labels: npt.NDArray[np.generic],
    clients: int,
    alpha: float,
    min_examples: int,
    rng: np.random.Generator,
) -> list[Indices]:
    by_class = [
        rng.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        for label in np.unique(labels)
    ]
    best: list[Indices] = []
    best_smallest = -1
    for _ in range(DRAWS):
        parts = _deal_classes(by_class, clients, alpha, rng)
        smallest = min(len(part) for part in parts)
        if smallest > best_smallest:
            best, best_smallest = parts, smallest
        if best_smallest >= min_examples:
            return best
    return _repair(best, labels, min_examples)


def _deal_classes(
    by_class: list[Indices], clients: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    pieces: list[list[Indices]] = [[np.empty(0, dtype=np.int64)] for _ in range(clients)]
    for indices in by_class:
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(indices) + 0.5).astype(np.int64)
        for client, piece in enumerate(np.split(indices, np.clip(cuts, 0, len(indices)))):
            pieces[client].append(piece)
    return [np.concatenate(own) for own in pieces]


def _repair(
    parts: list[Indices], labels: npt.NDArray[np.generic], min_examples: int
) -> list[Indices]:
    """Move examples of the most frequent class of the largest clients to clients with too few.

    Each move fills one missing example, and a donor never falls below the minimum itself, so this ends after at
    most ``len(parts) * min_examples`` moves.
    """
    _, classes = np.unique(labels, return_inverse=True)
    counts = np.stack([np.bincount(classes[part], minlength=classes.max() + 1) for part in parts])
    held = [part.tolist() for part in parts]
    for needy in range(len(held)):
        while len(held[needy]) < min_examples:
            donor = max(range(len(held)), key=lambda client: len(held[client]))
            commonest = int(counts[donor].argmax())
            position = next(
                place for place, index in enumerate(held[donor]) if classes[index] == commonest
            )
            held[needy].append(held[donor].pop(position))
            counts[donor, commonest] -= 1
            counts[needy, commonest] += 1
    return [np.asarray(indices, dtype=np.int64) for indices in held]


def _pathological(
    labels: npt.NDArray[np.generic],
    clients: int,
    classes_per_client: int,
    min_examples: int,
    rng: np.random.Generator,
) -> list[Indices]:
    names = np.unique(labels)
    if not 1 <= classes_per_client <= len(names):
        raise ScenarioError(
            f"classes_per_client {classes_per_client} of {len(names)} classes: give 1 to {len(names)}"
        )
    if clients * classes_per_client < len(names):
        raise ScenarioError(
            f"{clients} clients of {classes_per_client} classes each do not hold all {len(names)}: raise "
            "classes_per_client or the number of clients"
        )
    takers: list[list[int]] = [[] for _ in names]
    for client in range(clients):
        # Take the classes that the fewest clients have so far, in random order among equal ones.
        shuffled = rng.permutation(len(names))
        fewest = sorted(shuffled, key=lambda place: len(takers[place]))[:classes_per_client]
        for place in fewest:
            takers[place].append(client)
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for name, mine in zip(names, takers, strict=True):
        dealt = rng.permutation(np.flatnonzero(labels == name)).astype(np.int64)
        for client, piece in zip(mine, np.array_split(dealt, len(mine)), strict=True):
            pieces[client].append(piece)
    parts = [np.concatenate(own) for own in pieces]
    _refuse_small(parts, min_examples, "classes dealt evenly")
    return parts


def _natural(
    owners: npt.ArrayLike | None,
    examples: int,
    clients: int,
    min_examples: int,
    rng: np.random.Generator,
) -> list[Indices]:
    if owners is None:
        raise ScenarioError(
            "a natural partition needs a dataset whose examples have owners: "
            "choose such a dataset, or the partition iid or dirichlet"
        )
    owner_array = np.asarray(owners)
    if owner_array.shape != (examples,):
        raise ScenarioError(
            f"{owner_array.shape} owners do not fit {examples} labels: give one each"
        )
    names, of_owner = np.unique(owner_array, return_inverse=True)
    if len(names) < clients:
        raise ScenarioError(
            f"{len(names)} owners cannot be dealt to {clients} clients: use at most {len(names)}"
        )
    client_of = _balance(np.bincount(of_owner), clients, rng)
    parts = [np.flatnonzero(client_of[of_owner] == client) for client in range(clients)]
    _refuse_small(parts, min_examples, "whole owners")
    return [part.astype(np.int64, copy=False) for part in parts]


def _balance(sizes: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Give each owner, largest first, to the client with the fewest examples so far."""
    shuffled = rng.permutation(len(sizes))  # so that the seed decides between owners of equal size
    largest_first = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    client_of = np.empty(len(sizes), dtype=np.int64)
    loads = np.zeros(clients, dtype=np.int64)
    for owner in largest_first:
        client = int(loads.argmin())
        client_of[owner] = client
        loads[client] += sizes[owner]
    return client_of


def _refuse_small(parts: Sequence[Indices], min_examples: int, what: str) -> None:
    """Raise ScenarioError if dealing out whole units leaves a client with too few examples."""
    smallest = min(len(part) for part in parts)
    if smallest < min_examples:
        raise ScenarioError(
            f"{what} leave a client with {smallest} examples, below min_examples {min_examples}: lower "
            "min_examples or the number of clients"
        )


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
    """Deal four labels in ten to the slower half of the clients only, the others to all clients.

    Parameters
    ----------
    labels : array of int
        The class of each example.
    slowdowns : sequence of float
        Slowdown of each client; those above the median are slow.
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
    """Deal whole owners to clients so that the owners most unlike the others go to slow clients.

    Owners are sorted by the first principal component of their mean inputs, clients by speed, and each client takes
    the next owners until it has its share.

    Parameters
    ----------
    inputs : array, shape (examples, ...)
        Recorded inputs.
    owners : array of int
        Owner of each input.
    slowdowns : sequence of float
        Slowdown of each client.
    min_examples : int
        Number of examples of the smallest client.

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
    # The sign of a component is arbitrary: take the more distant end as the unlike one.
    along = names[np.argsort(component if component.max() > -component.min() else -component)]
    by_speed = np.argsort(slowdowns, kind="stable")
    parts: list[Indices] = [np.empty(0, dtype=np.int64)] * len(slowdowns)
    for client, mine in zip(by_speed, np.array_split(along, len(slowdowns)), strict=True):
        parts[client] = np.flatnonzero(np.isin(owner_array, mine)).astype(np.int64)
    _refuse_small(parts, min_examples, "whole owners")
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
