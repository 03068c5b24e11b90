"""Of a layer trained by channels, the update says which: it counts in those alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import flat_profile, images, loss_fn, sgd
from torch import nn
from trainer_settings import free_probes, settings_of

from fl_elastic.aggregation import PartialMean
from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.planning import Needs, Plan, PlanRequest, Policy
from fl_elastic.planning.importance import ChannelScore, Probe
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.planning.importance.taps import Layer, scored_layers
from fl_elastic.training import ElasticTrainer
from fl_elastic.update import Manifest, decode, encode, weights_of
from fl_elastic.update.checks import check_update
from fl_elastic.update.partial import trained_part

HEAD = {"6": Mode.FULL}
HALF = HEAD | {"3": Mode.channels(0.5)}
QUARTER = HEAD | {"3": Mode.channels(0.25)}
ROWS = HEAD | {"3": Mode.channels(0.5, axis="out")}
WHOLE = HEAD | {"3": Mode.FULL}
DEPTHWISE = HEAD | {"2": Mode.channels(0.5, axis="in")}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 10, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3),
    )  # fmt: skip


class ByModes(Policy):
    """Trains by one table of modes after the other; the last one stays."""

    needs = Needs(importance=True)

    def __init__(self, *tables: dict[str, Mode]) -> None:
        self.tables = list(tables)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the next table."""
        table = self.tables.pop(0) if len(self.tables) > 1 else self.tables[0]
        names = request.profile.group_names
        assert set(table) <= set(names)
        return request.plan("by modes", [table.get(name, Mode.FROZEN) for name in names])


class ByChance(ChannelScore):
    """Others at each probe."""

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        draw = probe.generator.random
        return {
            layer.group.name: ChannelScores(draw(_inputs(layer)), draw(len(layer.module.weight)))
            for layer in scored_layers(probe.model, probe.groups, graph)
        }


def _inputs(layer: Layer) -> int:
    module = layer.module
    return module.in_channels if isinstance(module, nn.Conv2d) else module.in_features


def fitted(
    *tables: dict[str, Mode], batches: int = 9, **options: Any
) -> tuple[ElasticTrainer, tuple[tuple[int, Plan], ...]]:
    data = images(batches)
    model = net()
    settings: dict[str, Any] = {
        "closed_loop": False,
        "full_update_every": 0,
        "below_cosine": 2.0,
        "probe_every": 3,
    } | options
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.01), profile=flat_profile(model, data[0]),
        **settings_of(**settings),
    )  # fmt: skip
    trainer.planner.policy = policy = ByModes(*tables)
    policy.needs = replace(policy.needs, channel_score=ByChance())
    return trainer, trainer.fit(data).plans


def mask(channels: set[int], count: int) -> list[bool]:
    return [channel in channels for channel in range(count)]


@pytest.mark.parametrize(
    ("table", "axis", "count"), [(HALF, 1, 8), (ROWS, 0, 10), (DEPTHWISE, 0, 8)],
    ids=["inputs", "outputs", "depthwise"],
)  # fmt: skip
def test_the_part_is_the_plans_channels(table: dict[str, Mode], axis: int, count: int) -> None:
    trainer, plans = fitted(table, batches=2)
    (name,) = plans[0][1].channels
    update = trainer.update()
    assert list(update.parts) == [f"{name}.weight"]
    part = update.parts[f"{name}.weight"]
    assert [side is None for side in part] == [place != axis for place in range(4)]
    assert part[axis].tolist() == mask(set(plans[0][1].channels[name]), count)  # type: ignore[union-attr]
    check_update(update, trainer.manifest)
    # A bias gets the whole gradient, whatever the channels of its weight.
    assert np.count_nonzero(update.deltas[f"{name}.bias"]) == len(update.deltas[f"{name}.bias"])


def test_the_parts_of_several_plans_are_their_union(monkeypatch: pytest.MonkeyPatch) -> None:
    free_probes(monkeypatch)
    trainer, plans = fitted(QUARTER, QUARTER, QUARTER)
    chosen = [set(plan.channels["3"]) for _, plan in plans]
    assert len(chosen) >= 2
    assert chosen[0] != chosen[1]
    update = trainer.update()
    part = update.parts["3.weight"]
    assert part[1].tolist() == mask(set().union(*chosen), 8)  # type: ignore[union-attr]
    moved = np.abs(update.deltas["3.weight"]).sum(axis=(0, 2, 3)) > 0
    assert (moved <= part[1]).all()
    check_update(update, trainer.manifest)


@pytest.mark.parametrize(
    "tables", [(HALF, WHOLE), (WHOLE, HALF), (HALF, ROWS), (ROWS, HALF)],
    ids=["then whole", "whole before", "in then out", "out then in"],
)  # fmt: skip
def test_a_weight_that_some_plan_trained_otherwise_is_whole(
    tables: tuple[dict[str, Mode], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_probes(monkeypatch)
    trainer, plans = fitted(*tables)
    assert len(plans) >= 2
    update = trainer.update()
    assert update.parts == {}
    check_update(update, trainer.manifest)


@pytest.mark.parametrize("other", [HEAD, HEAD | {"3": Mode.BIAS}], ids=["frozen", "bias only"])
def test_a_plan_that_leaves_the_weight_alone_does_not_widen_it(
    other: dict[str, Mode], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_probes(monkeypatch)
    trainer, plans = fitted(HALF, other)
    assert len(plans) >= 2
    update = trainer.update()
    assert update.parts["3.weight"][1].tolist() == mask(set(plans[0][1].channels["3"]), 8)  # type: ignore[union-attr]


def test_each_fit_has_its_own_parts() -> None:
    trainer, _ = fitted(HALF, batches=2)
    assert trainer.update().parts
    trainer.planner.policy = ByModes(WHOLE)
    trainer.fit(images(2))
    assert trainer.update().parts == {}


def test_the_server_counts_a_client_in_its_channels_alone() -> None:
    """Two clients, one of them by channels: the others' channels keep the whole of the one that trained them."""
    parted, _ = fitted(HALF, batches=2)
    whole, _ = fitted(WHOLE, batches=2)
    manifest = Manifest.of(net())
    updates = [decode(encode(each.update(), manifest), manifest) for each in (parted, whole)]
    base = weights_of(net(), manifest)
    mean = PartialMean(manifest)
    for update in updates:
        mean.add(update)
    change = mean.finish(base)["3.weight"] - base["3.weight"]
    part = np.broadcast_to(trained_part(updates[0], "3.weight"), change.shape)  # type: ignore[arg-type]
    one, other = (update.deltas["3.weight"] for update in updates)
    assert part.any()
    assert not part.all()
    np.testing.assert_allclose(change[~part], other[~part], atol=1e-6)
    np.testing.assert_allclose(change[part], (one + other)[part] / 2, atol=1e-6)
