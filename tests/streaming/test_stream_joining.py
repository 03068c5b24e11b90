"""A device's model joined with the federation's, computed by hand; and what holds for every share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import StreamError
from fl_elastic.flower.stream_data import shares_to_try
from fl_elastic.streaming.labelled_weights import (
    LabelledWeights,
    Shares,
    extended,
    joined,
    overlaid,
)

HEAD = ("head.weight", "head.bias")


def model_of(labels: tuple[int, ...], rows: int, seed: int = 0) -> LabelledWeights:
    """A body, a norm and a head of so many rows."""
    draw = np.random.default_rng(seed)
    return LabelledWeights(
        {
            "body.weight": draw.normal(size=(3, 2)).astype(np.float32),
            "norm.weight": draw.normal(size=3).astype(np.float32),
            "norm.running_mean": draw.normal(size=3).astype(np.float32),
            "norm.count": np.array(seed, np.int64),
            "head.weight": draw.normal(size=(rows, 3)).astype(np.float32),
            "head.bias": draw.normal(size=rows).astype(np.float32),
        },
        labels,
        HEAD,
    )


def tiny(labels: tuple[int, ...], bias: list[float], body: list[float]) -> LabelledWeights:
    return LabelledWeights({"body": np.array(body), "bias": np.array(bias)}, labels, ("bias",))


def test_rows_are_matched_by_label_and_kept_where_only_one_side_has_them() -> None:
    own = tiny((7, 3), [1.0, 2.0, 9.0], [0.0, 8.0])
    theirs = tiny((4, 3), [10.0, 20.0], [4.0, 4.0])
    half = joined(own, theirs, Shares(0.5))
    # 7 is the device's alone, 3 is half of 2 and 20, 4 is the federation's alone and takes the spare row.
    assert half.labels == (7, 3, 4)
    assert half.weights["bias"].tolist() == [1.0, 11.0, 10.0]
    assert half.weights["body"].tolist() == [2.0, 6.0]
    whole = joined(own, theirs, Shares(1.0))
    assert whole.weights["bias"].tolist() == [1.0, 20.0, 10.0]
    assert whole.weights["body"].tolist() == [4.0, 4.0]
    # The head grows only where no row is left, and what stands for nothing stays.
    grown = joined(tiny((7, 3), [1.0, 2.0], [0.0, 0.0]), theirs, Shares(0.25))
    assert grown.weights["bias"].tolist() == [1.0, 6.5, 10.0]
    spare = joined(tiny((3,), [1.0, 5.0, 6.0], [0.0, 0.0]), theirs, Shares(1.0))
    assert spare.weights["bias"].tolist() == [20.0, 10.0, 6.0] and spare.labels == (3, 4)


def test_what_is_told_the_server_is_in_its_own_order() -> None:
    server = tiny((4, 3), [10.0, 20.0, 0.5], [4.0, 4.0])
    device = tiny((7, 3, 4), [1.0, 2.0, 3.0], [5.0, 5.0])
    seen = overlaid(server, device)
    assert seen.labels == (4, 3) and seen.weights["bias"].tolist() == [3.0, 2.0, 0.5]
    assert seen.weights["body"].tolist() == [5.0, 5.0]


def test_an_extended_model_is_the_devices_own_with_rows_for_more_labels() -> None:
    own, theirs = tiny((7,), [1.0], [0.0]), tiny((4, 7, 3), [10.0, 20.0, 30.0], [4.0])
    both = extended(own, theirs)
    assert both.labels == (7, 4, 3) and both.weights["bias"].tolist() == [1.0, 10.0, 30.0]
    assert own.weights["bias"].tolist() == [1.0]


@pytest.mark.parametrize("joining", ["replaced", (), (1.5,), (0.5, float("nan"))])
def test_shares_that_mean_nothing_are_refused(joining: Any) -> None:
    with pytest.raises(StreamError, match="give measured or replace"):
        shares_to_try(joining)


def test_what_is_fixed_is_the_federations() -> None:
    own, theirs = tiny((7,), [1.0], [0.0]), tiny((7,), [5.0], [4.0])
    found = joined(own, theirs, Shares(0.25, frozenset({"body"})))
    assert found.weights["body"].tolist() == [4.0] and found.weights["bias"].tolist() == [2.0]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
class TestEveryShare:
    """What holds however much is taken."""

    def test_the_joined_model_lies_between_both(self, share: float) -> None:
        own, theirs = model_of((0, 1, 2), 3, seed=1), model_of((2, 0, 1), 3, seed=2)
        aim = overlaid(own, theirs)
        for each, value in joined(own, theirs, Shares(share)).weights.items():
            low = np.minimum(own.weights[each], aim.weights[each])
            high = np.maximum(own.weights[each], aim.weights[each])
            assert (value >= low - 1e-6).all() and (value <= high + 1e-6).all()
            assert value.dtype == own.weights[each].dtype

    def test_what_only_the_device_knows_stays_bit_for_bit(self, share: float) -> None:
        own, theirs = model_of((5, 1, 9), 4, seed=1), model_of((1, 3), 2, seed=2)
        found = joined(own, theirs, Shares(share))
        assert found.labels == (5, 1, 9, 3)
        for each in HEAD:
            for row in (0, 2):
                assert np.array_equal(found.weights[each][row], own.weights[each][row])
            assert np.array_equal(found.weights[each][3], theirs.weights[each][1])

    def test_a_federation_that_knows_the_same_changes_nothing(self, share: float) -> None:
        own = model_of((5, 1), 3)
        found = joined(own, model_of((5, 1), 3), Shares(share))
        assert all(np.array_equal(found.weights[n], own.weights[n]) for n in own.weights)

    def test_neither_model_is_written_into(self, share: float) -> None:
        own, theirs = model_of((5, 1), 2, seed=1), model_of((1, 5), 2, seed=2)
        for value in joined(own, theirs, Shares(share)).weights.values():
            value += 1
        assert all(
            np.array_equal(own.weights[n], model_of((5, 1), 2, seed=1).weights[n])
            and np.array_equal(theirs.weights[n], model_of((1, 5), 2, seed=2).weights[n])
            for n in own.weights
        )
