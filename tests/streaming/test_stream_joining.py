"""A device's model joined with the federation's, computed by hand; and what every rule must satisfy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fl_elastic.errors import RegistryError, StreamError
from fl_elastic.streaming.joining import (
    JOINING_RULES,
    Interpolate,
    JoiningRule,
    Layout,
    Measured,
    Personal,
    Replace,
)
from fl_elastic.streaming.labelled_weights import (
    LabelledWeights,
    Shares,
    extended,
    joined,
    overlaid,
)

HEAD = ("head.weight", "head.bias")
LAYOUT = Layout(HEAD, ("norm.running_mean", "norm.count"), ("norm.weight",))


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


def test_shares_by_name_and_after_a_drift() -> None:
    rule = Interpolate(0.5, after_drift=1.0, groups={"head": 0.0, "head.bias": 0.25})
    calm, shaken = (rule.candidates(LAYOUT, drifted=drifted)[0] for drifted in (False, True))
    assert [calm.of(n) for n in ("body.weight", *HEAD)] == [0.5, 0.0, 0.25]
    assert [shaken.of(n) for n in ("body.weight", *HEAD)] == [1.0, 0.0, 0.25]
    assert Interpolate(0.3).candidates(LAYOUT, drifted=True) == (Shares(0.3),)


def test_what_is_personal_stays_whatever_the_other_rule_says() -> None:
    rule = Personal(others=Interpolate(0.5, groups={"head.weight": 1.0, "body": 0.75}))
    (shares,) = rule.candidates(LAYOUT, drifted=False)
    assert shares.of("head.weight") == shares.of("norm.weight") == 0.0
    assert shares.of("norm.running_mean") == 0.0 and shares.of("body.weight") == 0.75
    named = Personal(("body",))
    assert named.personal(LAYOUT) == ("body",)
    (shares,) = named.candidates(LAYOUT, drifted=False)
    assert shares.of("body.weight") == 0.0 and shares.of("head.weight") == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Interpolate(1.5),
        lambda: Interpolate(0.5, after_drift=-0.1),
        lambda: Interpolate(0.5, groups={"body": float("nan")}),
        lambda: Measured(()),
        lambda: Measured((0.5, 2.0)),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], JoiningRule]) -> None:
    with pytest.raises(StreamError, match="give"):
        make()


def test_names() -> None:
    assert JOINING_RULES.names() == ["interpolate", "measured", "personal", "replace"]
    assert JOINING_RULES.make("replace") == Replace()
    with pytest.raises(RegistryError, match="did you mean 'replace'"):
        JOINING_RULES.make("replaced")


@pytest.mark.parametrize("name", JOINING_RULES.names())
class TestEveryRule:
    """Conformance: holds for all that are registered."""

    def test_shares_are_shares_and_always_the_same(self, name: str) -> None:
        for drifted in (False, True):
            tried = JOINING_RULES.make(name).candidates(LAYOUT, drifted=drifted)
            assert tried and tried == JOINING_RULES.make(name).candidates(LAYOUT, drifted=drifted)
            for shares in tried:
                assert all(0 <= shares.of(n) <= 1 for n in model_of((0,), 1).weights)

    def test_nothing_is_taken_of_what_is_personal(self, name: str) -> None:
        rule = JOINING_RULES.make(name)
        kept = tuple(rule.personal(LAYOUT))
        for shares in rule.candidates(LAYOUT, drifted=False):
            personal = [n for n in model_of((0,), 1).weights if n.startswith(kept)]
            assert all(shares.of(n) == 0 for n in personal)

    def test_the_joined_model_lies_between_both(self, name: str) -> None:
        own, theirs = model_of((0, 1, 2), 3, seed=1), model_of((2, 0, 1), 3, seed=2)
        aim = overlaid(own, theirs)
        for shares in JOINING_RULES.make(name).candidates(LAYOUT, drifted=True):
            found = joined(own, theirs, shares)
            for each, value in found.weights.items():
                low = np.minimum(own.weights[each], aim.weights[each])
                high = np.maximum(own.weights[each], aim.weights[each])
                assert (value >= low - 1e-6).all() and (value <= high + 1e-6).all()
                assert value.dtype == own.weights[each].dtype

    def test_what_only_the_device_knows_stays_bit_for_bit(self, name: str) -> None:
        own, theirs = model_of((5, 1, 9), 4, seed=1), model_of((1, 3), 2, seed=2)
        for shares in JOINING_RULES.make(name).candidates(LAYOUT, drifted=True):
            found = joined(own, theirs, shares)
            assert found.labels == (5, 1, 9, 3)
            for each in HEAD:
                for row in (0, 2):
                    assert np.array_equal(found.weights[each][row], own.weights[each][row])
                assert np.array_equal(found.weights[each][3], theirs.weights[each][1])

    def test_a_federation_that_knows_the_same_changes_nothing(self, name: str) -> None:
        own = model_of((5, 1), 3)
        for shares in JOINING_RULES.make(name).candidates(LAYOUT, drifted=False):
            found = joined(own, model_of((5, 1), 3), shares)
            assert all(np.array_equal(found.weights[n], own.weights[n]) for n in own.weights)

    def test_neither_model_is_written_into(self, name: str) -> None:
        own, theirs = model_of((5, 1), 2, seed=1), model_of((1, 5), 2, seed=2)
        for shares in JOINING_RULES.make(name).candidates(LAYOUT, drifted=False):
            for value in joined(own, theirs, shares).weights.values():
                value += 1
        assert all(
            np.array_equal(own.weights[n], model_of((5, 1), 2, seed=1).weights[n])
            and np.array_equal(theirs.weights[n], model_of((1, 5), 2, seed=2).weights[n])
            for n in own.weights
        )
