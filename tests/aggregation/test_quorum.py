"""A minority is one of each tensor's contributors: without a quorum it stays, and statistics obey the rule too."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.errors import SettingError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

NORMED = Manifest(
    ("w", "head", "bn.running_mean", "bn.running_var"),
    ((4,), (2,), (3,), (3,)),
    ("float32",) * 4,
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.STATISTIC),
)
BASE = {
    "w": np.zeros(4, np.float32),
    "head": np.zeros(2, np.float32),
    "bn.running_mean": np.zeros(3, np.float32),
    "bn.running_var": np.ones(3, np.float32),
}
ROBUST = ["krum", "median", "norm_clipping", "trimmed_mean"]
Merged = tuple[dict[str, np.ndarray], PartialMean]


def honest(client: int, names: tuple[str, ...] = NORMED.names, steps: int = 8) -> PartialUpdate:
    rng = np.random.default_rng(client)
    values = {"w": 1.0, "head": 1.0, "bn.running_mean": 0.5, "bn.running_var": -0.3}
    deltas = {
        name: (values[name] + 0.02 * rng.standard_normal(NORMED.shape(name))).astype(np.float32)
        for name in names
    }
    return PartialUpdate(deltas, dict.fromkeys(deltas, steps), 100)


def scaled(update: PartialUpdate, factors: dict[str, float], **changes: int) -> PartialUpdate:
    deltas = {name: delta * factors.get(name, 1.0) for name, delta in update.deltas.items()}
    steps = dict.fromkeys(deltas, changes.get("steps", 8))
    return PartialUpdate(deltas, steps, changes.get("examples", update.num_examples))


def merge(rule: str, updates: list[PartialUpdate], **options: object) -> Merged:
    mean = PartialMean(NORMED, rule, options=MergeOptions(**options))  # type: ignore[arg-type]
    for update in updates:
        mean.add(update)
    return mean.finish(BASE), mean


def assert_near(found: dict[str, np.ndarray], names: tuple[str, ...] = NORMED.names) -> None:
    expected = {"w": 1.0, "head": 1.0, "bn.running_mean": 0.5, "bn.running_var": 0.7}
    for name in names:
        assert found[name] == pytest.approx(np.full(NORMED.shape(name), expected[name]), abs=0.2), (
            name
        )


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("rule", ["krum", "median", "trimmed_mean"])
def test_statistics_obey_the_rule(rule: str, bad: int) -> None:
    liars = [scaled(honest(c), {"bn.running_var": 1e6}) for c in range(bad)]
    found, _ = merge(rule, [*liars, *(honest(c) for c in range(bad, 10))])
    assert_near(found)


@pytest.mark.parametrize("rule", ["contributors", *ROBUST])
def test_a_running_variance_is_never_negative(rule: str) -> None:
    updates = [scaled(honest(c), {"bn.running_var": 40.0}) for c in range(10)]
    found, _ = merge(rule, updates)
    assert (found["bn.running_var"] >= 0).all()


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("rule", ROBUST)
def test_who_trains_a_tensor_alone_does_not_move_it(rule: str, bad: int) -> None:
    most = ("head", "bn.running_mean", "bn.running_var")
    liars = [scaled(honest(c), {"w": 1000.0}) for c in range(bad)]
    found, mean = merge(rule, [*liars, *(honest(c, most) for c in range(bad, 10))])
    assert not found["w"].any()
    assert_near(found, ("head", "bn.running_mean"))
    # Said, and not taken for trained by who asks what was touched.
    assert mean.stayed == {"w": bad}
    assert "w" not in mean.touched and "head" in mean.touched


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("rule", ROBUST)
def test_among_one_or_two_there_is_no_minority(rule: str, clients: int) -> None:
    found, mean = merge(rule, [honest(c) for c in range(clients)])
    assert not found["w"].any()
    assert set(mean.stayed) == set(NORMED.names)


def test_two_liars_of_ten_need_five_contributors() -> None:
    few = ("head", "bn.running_mean", "bn.running_var")
    for contributors, moves in ((4, False), (5, True)):
        clients = [honest(c) for c in range(contributors)]
        found, _ = merge("median", [*clients, *(honest(c, few) for c in range(contributors, 10))])
        assert bool(found["w"].any()) is moves


def test_elements_of_a_part_need_a_quorum_of_their_own() -> None:
    mask = np.array([True, True, False, False])
    parts = [PartialUpdate({"w": 1.0 * mask}, {"w": 1}, 1, parts={"w": (mask,)}) for _ in range(2)]
    whole = [PartialUpdate({"w": np.full(4, 1.0)}, {"w": 1}, 1) for _ in range(2)]
    for rule in ("median", "trimmed_mean", "norm_clipping"):
        found, _ = merge(rule, [*parts, *whole])
        assert found["w"].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_norm_clipping_does_not_count_claimed_examples() -> None:
    liar = scaled(honest(0), dict.fromkeys(NORMED.names, -1.0), examples=100_000_000)
    found, _ = merge("norm_clipping", [liar, *(honest(c) for c in range(1, 10))])
    assert found["w"] == pytest.approx(np.full(4, 0.8), abs=0.1)


@pytest.mark.parametrize("rule", ["contributors", *ROBUST])
@pytest.mark.parametrize("claimed", [1_000_000, 1])
def test_claimed_steps_do_not_stretch_everybodys(rule: str, claimed: int) -> None:
    liar = scaled(honest(0), {}, steps=claimed)
    found, _ = merge(rule, [liar, *(honest(c) for c in range(1, 10))], normalise_steps=True)
    assert (found["w"] > 0.7).all() and (found["w"] < 2.0).all()


@pytest.mark.parametrize("bad", [1, 2])
def test_krum_goes_on_when_tensors_are_left_out_or_nothing_was_trained(bad: int) -> None:
    nothing = [PartialUpdate({}, {}, 100) for _ in range(bad)]
    found, _ = merge("krum", [*nothing, *(honest(c) for c in range(bad, 10))])
    assert_near(found)
    lacking = [honest(c, ("w", "bn.running_mean", "bn.running_var")) for c in range(bad)]
    found, _ = merge("krum", [*lacking, *(honest(c) for c in range(bad, 10))])
    assert_near(found, ("w",))
    assert found["w"].any()


def test_krum_looks_at_parts() -> None:
    mask = np.array([True, True, False, False])
    part = PartialUpdate({"w": 1.0 * mask}, {"w": 1}, 1, parts={"w": (mask,)})
    whole = [PartialUpdate({"w": np.full(4, v)}, {"w": 1}, 1) for v in (1.0, 1.1, 0.9, 50.0)]
    found, _ = merge("krum", [part, *whole])
    assert (found["w"][:2] > 0.5).all() and (found["w"] < 2.0).all()


def test_an_impossible_share_is_refused() -> None:
    for share in (-0.1, 0.5, float("nan")):
        with pytest.raises(SettingError, match="bad_share"):
            MergeOptions(bad_share=share)
