"""What a plan costs on the real graph: numbers written out by hand, and bounds on random graphs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import ProfileError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import BackwardGraph, BackwardNode, GroupKind
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes, step_memory
from fl_elastic.profiling.profile import ProfileKey
from fl_elastic.testing import made_up_profile

HEAD, LATE, SHORT, STEM = range(4)


def by_hand() -> CostProfile:
    """A residual block with a gap: every cost is another power of two or three.

    ::

        loss(0) - head(1) - add(2) - late(3) - relu(5) - stem(6)
                                   \\ short(4) /
    """
    sizes = {"head": 10, "late": 20, "short": 30, "stem": 40}
    groups = tuple(
        TensorGroup(name, (f"{name}.weight",), ((size,),), GroupKind.LINEAR)
        for name, size in sizes.items()
    )
    nodes = (
        BackwardNode("Loss", None, (1,)),
        BackwardNode("Addmm", HEAD, (2,)),
        BackwardNode("Add", None, (3, 4)),
        BackwardNode("Conv", LATE, (5,)),
        BackwardNode("Conv", SHORT, (5,)),
        BackwardNode("Relu", None, (6,)),
        BackwardNode("Conv", STEM, ()),
    )
    return CostProfile(
        key=ProfileKey("by hand", (1,), 1, "none", "none"),
        graph=BackwardGraph(groups, nodes),
        #                              loss head add late short relu stem
        node_update_seconds=np.array([0.0, 3.0, 0.0, 9.0, 27.0, 0.0, 81.0]),
        node_path_seconds=np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 0.0]),
        optimizer_seconds=np.array([0.1, 0.2, 0.3, 0.4]),
        forward_seconds=np.array([100.0, 110.0, 110.0, 130.0]),
        fixed_seconds=1000.0,
        node_saved_bytes=np.array([1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]),
        optimizer_bytes_per_weight=2.0,
    )


def mask_of(*groups: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    mask = np.zeros(4, dtype=bool)
    mask[list(groups)] = True
    return mask


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ((HEAD,), 100 + 1 + 3 + 0.1 + 1000),
        ((LATE,), 110 + 1 + 2 + 4 + 9 + 0.2 + 1000),
        ((SHORT,), 110 + 1 + 2 + 4 + 27 + 0.3 + 1000),
        ((HEAD, LATE), 110 + 1 + 2 + 4 + 3 + 9 + 0.3 + 1000),
        ((LATE, SHORT), 110 + 1 + 2 + 4 + 9 + 27 + 0.5 + 1000),
        ((HEAD, LATE, SHORT), 110 + 1 + 2 + 4 + 3 + 9 + 27 + 0.6 + 1000),
        ((STEM,), 130 + 1 + 2 + 4 + 8 + 16 + 32 + 81 + 0.4 + 1000),
        ((HEAD, STEM), 130 + 63 + 3 + 81 + 0.5 + 1000),
        ((LATE, STEM), 130 + 63 + 9 + 81 + 0.6 + 1000),
        ((HEAD, LATE, SHORT, STEM), 130 + 63 + 3 + 9 + 27 + 81 + 1.0 + 1000),
    ],
)
def test_step_seconds_are_those_of_the_nodes_that_run(
    trained: tuple[int, ...], expected: float
) -> None:
    assert by_hand().step_seconds(mask_of(*trained)) == pytest.approx(expected, rel=1e-12)


def test_a_step_that_trains_nothing_is_a_forward_pass() -> None:
    assert by_hand().step_seconds(mask_of()) == 100.0
    assert mask_bytes(by_hand(), mask_of()) == 0.0


def test_full_and_floor_are_everything_and_the_head() -> None:
    profile = by_hand()
    assert profile.full_step_seconds == profile.step_seconds(mask_of(0, 1, 2, 3))
    assert profile.floor_step_seconds == profile.step_seconds(mask_of(HEAD))


def test_update_seconds_are_own_gradient_and_optimiser() -> None:
    assert by_hand().update_seconds == pytest.approx([3.1, 9.2, 27.3, 81.4])


def test_path_seconds_are_the_way_and_the_longer_forward_pass() -> None:
    # To the head: loss. To late: head and add. To short: late. To the stem: short and relu.
    assert by_hand().path_seconds == pytest.approx([1, 2 + 4 + 10, 8, 16 + 32 + 20])


@pytest.mark.parametrize(
    ("trained", "saved"),
    [
        ((HEAD,), 11),
        ((LATE,), 1111),
        ((SHORT,), 10_111),
        ((LATE, SHORT), 11_111),
        ((STEM,), 1_111_111),
    ],
)
def test_step_bytes_are_saved_activations_gradients_and_state(
    trained: tuple[int, ...], saved: float
) -> None:
    weights = sum((10, 20, 30, 40)[group] for group in trained)
    modes = [Mode.FULL if on else Mode.FROZEN for on in mask_of(*trained)]
    memory = step_memory(by_hand(), modes)
    assert memory.kept == saved + weights * (4 + 2)
    # Before the backward pass all activations are there, after it all gradients, and one more tensor for a moment.
    one_more = max((10, 20, 30, 40)[group] for group in trained)
    with_deepest = 10 ** (len(str(saved)) - 1) + 4 * weights
    most = max(saved, with_deepest, 4 * (weights + one_more))
    # Besides at all times: what was trained as it was before, and the optimiser's state.
    assert mask_bytes(by_hand(), mask_of(*trained)) == memory.total == weights * (4 + 2) + most


@given(
    st.builds(made_up_profile, st.integers(1, 9), branched=st.booleans(), seed=st.integers(0, 999)),
    st.integers(0, 999),
)
def test_many_steps_at_once_cost_what_each_does(profile: CostProfile, seed: int) -> None:
    masks = np.random.default_rng(seed).random((20, len(profile))) < 0.4
    masks[:, profile.graph.head] = True
    assert profile.seconds_of(masks) == pytest.approx([profile.step_seconds(m) for m in masks])


def test_parameter_bytes_are_four_per_weight() -> None:
    assert by_hand().parameter_bytes.tolist() == [40.0, 80.0, 120.0, 160.0]
    assert by_hand().group_names == ("head", "late", "short", "stem")
    assert len(by_hand()) == 4


def test_a_group_with_two_nodes_pays_for_both_and_stands_at_the_deeper() -> None:
    groups = tuple(
        TensorGroup(name, (f"{name}.w",), ((1,),), GroupKind.LINEAR) for name in ("middle", "tied")
    )
    nodes = (
        BackwardNode("Mm", 1, (1,)),
        BackwardNode("Mm", 0, (2,)),
        BackwardNode("Embedding", 1, ()),
    )
    profile = replace(
        by_hand(),
        graph=BackwardGraph(groups, nodes),
        node_update_seconds=np.array([1.0, 10.0, 100.0]),
        node_path_seconds=np.array([2.0, 20.0, 0.0]),
        node_saved_bytes=np.zeros(3),
        optimizer_seconds=np.zeros(2),
        forward_seconds=np.zeros(2),
        fixed_seconds=0.0,
    )
    assert profile.update_seconds.tolist() == [10.0, 101.0]
    assert profile.path_seconds.tolist() == [2.0, 20.0]
    assert profile.step_seconds(np.array([False, True])) == 2 + 20 + 101
    assert profile.step_seconds(np.array([True, False])) == 2 + 10
    assert profile.floor_step_seconds == 2 + 20 + 101


profiles = st.builds(
    made_up_profile, st.integers(1, 20), branched=st.booleans(), seed=st.integers(0, 10**6)
)


@given(profile=profiles, data=st.data())
def test_the_chain_costs_are_an_upper_bound_and_exact_on_a_chain(
    profile: CostProfile, data: st.DataObject
) -> None:
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(profile), max_size=len(profile)))
    )
    if not mask.any():
        mask[0] = True
    deepest = int(np.flatnonzero(mask)[-1])
    chain = profile.forward_seconds[0] + profile.fixed_seconds
    chain += profile.update_seconds[mask].sum() + profile.path_seconds[: deepest + 1].sum()
    exact = profile.step_seconds(mask)
    assert exact <= chain * (1 + 1e-12)
    if all(len(node.inputs) <= 1 for node in profile.graph.nodes):
        assert exact == pytest.approx(chain, rel=1e-12)


def test_branches_make_the_bound_strict_somewhere() -> None:
    profile = made_up_profile(groups=7, branched=True)
    shallow = np.array([True, False, True, False, False, False, False])
    short = np.array([True, False, False, True, False, False, False])
    for mask in (shallow, short):
        deepest = int(np.flatnonzero(mask)[-1])
        chain = profile.forward_seconds[0] + profile.fixed_seconds
        chain += profile.update_seconds[mask].sum() + profile.path_seconds[: deepest + 1].sum()
        exact = profile.step_seconds(mask)
        assert exact <= chain + 1e-15
    assert exact < chain - 1e-9


@given(profile=profiles, data=st.data())
def test_training_more_never_costs_less(profile: CostProfile, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=len(profile), max_size=len(profile))
    some = np.array(data.draw(flags))
    more = some | np.array(data.draw(flags))
    if some.any():
        assert profile.step_seconds(some) <= profile.step_seconds(more) * (1 + 1e-12)
    assert mask_bytes(profile, some) <= mask_bytes(profile, more)


@pytest.mark.parametrize(
    "name",
    [
        "node_update_seconds",
        "node_path_seconds",
        "node_saved_bytes",
        "optimizer_seconds",
        "forward_seconds",
    ],
)
@pytest.mark.parametrize("damage", ["negative", "nan", "infinite", "short", "two-dimensional"])
def test_costs_that_cannot_be_are_refused_by_name(name: str, damage: str) -> None:
    profile = by_hand()
    array = getattr(profile, name).copy()
    if damage == "short":
        array = array[:-1]
    elif damage == "two-dimensional":
        array = array[:, None]
    else:
        array[1] = {"negative": -1e-9, "nan": np.nan, "infinite": np.inf}[damage]
    with pytest.raises(ProfileError, match=name):
        replace(profile, **{name: array})


@pytest.mark.parametrize("name", ["fixed_seconds", "optimizer_bytes_per_weight"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_constants_that_cannot_be_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ProfileError, match=name):
        replace(by_hand(), **{name: value})


def test_keys_tell_in_what_they_differ() -> None:
    key = by_hand().key
    other = replace(key, threads=4, batch_shape=(2,))
    assert key.differences(key) == []
    assert key.differences(other) == ["batch_shape (1,) against (2,)", "threads 1 against 4"]


def test_costs_of_earlier_fits_are_let_go() -> None:
    profile, mask = made_up_profile(), np.ones(8, dtype=bool)
    known = []
    for number in range(30):
        later = replace(profile, fixed_seconds=float(number))
        assert mask_bytes(later, mask) == mask_bytes(profile, mask)
        known.append(weakref.ref(later))
    del later
    gc.collect()
    assert sum(each() is not None for each in known) <= 8
