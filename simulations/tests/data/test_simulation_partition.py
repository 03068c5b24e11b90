"""Partitions: every index exactly once, repeatable, no client too small, and as skewed as asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.data.partition import partition_indices

Labels = npt.NDArray[np.int64]
quick = settings(max_examples=60, deadline=None)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Labels, int, int, float, int]:
    """Draw labels, clients, the smallest client that is just possible, alpha and a seed."""
    labels = draw(st.lists(st.integers(0, 6), min_size=1, max_size=150))
    clients = draw(st.integers(1, len(labels)))
    smallest = draw(st.integers(0, len(labels) // clients))
    alpha = draw(st.sampled_from([1e-300, 1e-3, 0.05, 0.3, 1.0, 100.0, 1e6]))
    return np.array(labels), clients, smallest, alpha, draw(st.integers(0, 2**32 - 1))


@quick
@given(split=splits(), method=st.sampled_from(["iid", "dirichlet"]))
def test_each_index_goes_to_one_client_and_no_client_is_too_small(
    split: tuple[Labels, int, int, float, int], method: str
) -> None:
    labels, clients, smallest, alpha, seed = split
    parts = partition_indices(
        labels, clients, method=method, alpha=alpha, seed=seed, min_examples=smallest
    )
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(len(part) for part in parts) >= smallest
    assert all(part.dtype == np.int64 and np.array_equal(part, np.sort(part)) for part in parts)


def _commonest_share(parts: list[Labels], labels: Labels) -> float:
    """Return how much of a client its commonest class makes up, in the mean."""
    return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))


def test_small_alpha_is_skewed_and_large_alpha_is_like_iid() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    shares = {
        alpha: _commonest_share(
            partition_indices(labels, 10, method="dirichlet", alpha=alpha, seed=1, min_examples=20),
            labels,
        )
        for alpha in (0.05, 0.5, 1000.0)
    }
    iid = _commonest_share(partition_indices(labels, 10, method="iid", seed=1), labels)
    assert shares[0.05] > 0.6 > shares[0.5] > 0.2 > shares[1000.0]
    assert shares[1000.0] == pytest.approx(iid, abs=0.03)


def test_a_repair_moves_no_more_than_is_missing() -> None:
    labels = np.repeat(np.arange(3), 100)
    parts = partition_indices(labels, 30, method="dirichlet", alpha=1e-3, seed=0, min_examples=5)
    sizes = sorted(len(part) for part in parts)
    # Three classes go to about three clients; each of the others is filled up to five, no further.
    assert sizes[:27] == [5] * 27


def test_the_repair_takes_no_donor_below_the_minimum() -> None:
    parts = partition_indices(
        np.zeros(40), 8, method="dirichlet", alpha=1e-3, seed=3, min_examples=5
    )
    assert [len(part) for part in parts] == [5] * 8


@quick
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=150),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_pathological_partitions_give_each_client_so_many_classes_and_share_these_evenly(
    labels: list[int], seed: int, data: st.DataObject
) -> None:
    names = np.unique(labels)
    share = data.draw(st.integers(1, len(names)))
    clients = data.draw(st.integers(-(-len(names) // share), 30))
    parts = partition_indices(
        labels, clients, method="pathological", classes_per_client=share, seed=seed, min_examples=0
    )
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    of_class = np.array([[np.sum(np.array(labels)[part] == n) for part in parts] for n in names])
    assert ((of_class > 0).sum(axis=0) <= share).all()
    for sizes in of_class:
        most = sizes.max()
        # A client may have drawn a class of which there are too few to go round.
        assert set(sizes) <= {0, most, most - 1}
    if min(np.bincount(labels)[names]) >= clients:
        held = (of_class > 0).sum(axis=1)
        assert ((of_class > 0).sum(axis=0) == share).all()
        assert held.max() - held.min() <= 1


@quick
@given(
    owners=st.lists(st.integers(0, 20), min_size=1, max_size=200),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_natural_partitions_deal_whole_owners_and_balance(
    owners: list[int], seed: int, data: st.DataObject
) -> None:
    of_example = np.array(owners)
    names, sizes = np.unique(of_example, return_counts=True)
    clients = data.draw(st.integers(1, len(names)))
    parts = partition_indices(
        np.zeros(len(owners)), clients, method="natural", seed=seed, owners=of_example
    )
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(owners)))
    held = [set(of_example[part].tolist()) for part in parts]
    assert sum(len(own) for own in held) == len(names)
    loads = [len(part) for part in parts]
    assert min(loads) >= 1
    assert max(loads) - min(loads) <= sizes.max()


def test_the_largest_owner_is_dealt_first() -> None:
    owners = np.array([*range(9), *[9] * 9])
    parts = partition_indices(np.zeros(18), 2, method="natural", seed=0, owners=owners)
    assert [len(part) for part in parts] == [9, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_examples": 6}, "20 examples are too few for 4 clients with at least 6 each"),
        ({"method": "natural"}, "needs a dataset whose examples have owners"),
        ({"method": "natural", "owners": [1, 2]}, "do not fit 20 labels"),
        ({"method": "natural", "owners": [0, 1] * 10}, "2 owners cannot be dealt to 4 clients"),
        (
            {"method": "natural", "owners": [0] * 17 + [1, 2, 3], "min_examples": 2},
            "leave a client with 1 examples, below min_examples 2",
        ),
        ({"method": "pathological", "classes_per_client": 6}, "classes_per_client 6 of 5 classes"),
        ({"method": "pathological", "classes_per_client": 1}, "do not hold all 5"),
        (
            {
                "method": "pathological",
                "clients": 5,
                "classes_per_client": 1,
                "labels": [0] * 17 + [1, 2, 3, 4],
                "min_examples": 2,
            },
            "leave a client with 1 examples, below min_examples 2",
        ),
    ],
)
def test_impossible_splits_are_explained(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"labels": np.arange(20) % 5, "clients": 4, "method": "dirichlet"}
    arguments.update(changes)
    with pytest.raises(ScenarioError, match=message) as caught:
        partition_indices(**arguments)
    assert "\n" not in str(caught.value)
