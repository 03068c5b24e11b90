"""The rule for windows of channels: a part counts by one over its share of the tensor."""

from __future__ import annotations

import numpy as np
import pytest
from window_units import kept_units

from fl_elastic.aggregation import PartialMean
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

MANIFEST = Manifest(("w",), ((4, 6),), ("float64",), (Role.PARAMETER,))
BASE = {"w": np.zeros((4, 6))}


def update_of(value: float, rows: list[int], columns: list[int]) -> PartialUpdate:
    held = (np.isin(np.arange(4), rows), np.isin(np.arange(6), columns))
    delta = np.where(np.outer(*held), value, 0.0)
    parts = {} if delta.all() else {"w": tuple(None if mask.all() else mask for mask in held)}
    return PartialUpdate({"w": delta}, {"w": 1}, num_examples=10, parts=parts)


def merged(rule: str, *updates: PartialUpdate) -> np.ndarray:
    mean = PartialMean(MANIFEST, rule)
    for update in updates:
        mean.add(update)
    return mean.finish(BASE)["w"]


def test_a_window_weighs_one_over_its_share() -> None:
    whole, window = update_of(1.0, [0, 1, 2, 3], list(range(6))), update_of(5.0, [0, 1], [0, 1, 2])
    # A quarter of the elements: as 4 clients where it is, and of these 5 the whole one is alone elsewhere.
    found = merged("inverse_share", whole, window)
    expected = np.full((4, 6), 0.5)
    expected[:2, :3] = (1.0 + 4 * 5.0) / 5
    np.testing.assert_allclose(found[:2, :3], expected[:2, :3])
    np.testing.assert_allclose(found[2:, 3:], 1.0 * 10 / 20)


def test_whole_tensors_are_merged_as_by_every_rule() -> None:
    updates = [update_of(value, [0, 1, 2, 3], list(range(6))) for value in (1.0, 2.0, 6.0)]
    np.testing.assert_allclose(merged("inverse_share", *updates), 3.0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_narrow_clients_count_nearer_to_their_data_than_by_contributors(length: int) -> None:
    """Over all starts of their windows, beside one client that trains everything."""
    shares = {}
    for rule in ("contributors", "inverse_share"):
        found = []
        for start in range(6):
            kept = kept_units(6, length, start).tolist()
            found.append(
                merged(
                    rule,
                    update_of(1.0, [0, 1, 2, 3], list(range(6))),
                    update_of(1000.0, [0, 1, 2, 3], kept),
                )
            )
        mean = np.mean(found, axis=0)
        np.testing.assert_allclose(mean, mean[0, 0])
        narrow = np.floor(mean[0, 0]) / 1000
        shares[rule] = narrow
    # Half of the data is theirs.
    assert shares["contributors"] < shares["inverse_share"] < 0.5
