"""A cut that moves up as blocks settle: movement against a slow loop, and when the cut moves."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from small_models import Residual, conv_net, images, loss_fn

from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic_simulations.engine.settling import (
    Movement,
    SettlingBlock,
    SettlingCut,
    settling_blocks,
)

_Weights = dict[str, np.ndarray]


def walk(seed: int, rounds: int, drift: float = 0.0, scalars: int = 40) -> list[_Weights]:
    """Models that go by chance, besides a drift."""
    generator = np.random.default_rng(seed)
    steps = generator.normal(drift, 1.0, (rounds, scalars))
    return [{"w": at} for at in np.cumsum(steps, axis=0)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_movement_is_that_of_a_slow_loop(seed: int, decay: float) -> None:
    models = walk(seed, 30, drift=0.2, scalars=7)
    movement = Movement(["w"], decay)
    assert movement.effective == math.inf
    for before, after in pairwise(models):
        movement.observe(before, after)
    moved = sizes = 0.0
    for scalar in range(7):
        mean = size = 0.0
        for before, after in pairwise(models):
            change = float(after["w"][scalar] - before["w"][scalar])
            mean = decay * mean + (1 - decay) * change
            size = decay * size + (1 - decay) * abs(change)
        moved, sizes = moved + abs(mean), sizes + size
    assert movement.effective == pytest.approx(moved / sizes)


def test_one_way_is_one_and_chance_is_what_it_is_said_to_be() -> None:
    on, by_chance = Movement(["w"]), Movement(["w"])
    models = walk(0, 100, scalars=20_000)
    for number, (before, after) in enumerate(pairwise(models)):
        on.observe({"w": np.full(3, number)}, {"w": np.full(3, number + 1)})
        by_chance.observe(before, after)
    assert on.effective == pytest.approx(1)
    assert by_chance.effective == pytest.approx(by_chance.by_chance, rel=0.02)


def graph_of(model: torch.nn.Module) -> BackwardGraph:
    return trace_step(model, loss_fn, images()[0]).graph


def test_blocks_are_all_but_the_last_and_say_what_is_trained_above_them() -> None:
    blocks = settling_blocks(graph_of(conv_net()))
    modules = [{name.split(".")[0] for name in block.parameters} for block in blocks]
    assert modules == [{"0", "1"}, {"3", "4"}, {"6", "7"}]
    assert [block.above for block in blocks] == ["3", "6", "11"]
    (unit,) = settling_blocks(graph_of(Residual()))
    assert unit.above == "head"
    assert {name.split(".")[0] for name in unit.parameters} == {"first", "second", "short"}


def test_the_cut_is_above_what_has_settled_and_everything_below_it() -> None:
    blocks = [SettlingBlock(("low",), "middle"), SettlingBlock(("mid",), "head")]
    cut = SettlingCut(RoundConfig(cut="moving"), blocks)
    assert cut.group == "" and not any(cut.due(number) for number in range(20))
    at: _Weights = {"low": np.zeros(50), "mid": np.zeros(50), "top": np.zeros(1)}
    places = []
    for number in range(40):
        # To and fro from the start in the middle, and at the bottom from round 20 on.
        to_and_fro = 1.0 if number % 2 else -1.0
        change = {"low": to_and_fro if number >= 20 else 1.0, "mid": to_and_fro, "top": 1.0}
        after = {name: at[name] + change[name] for name in at}
        before = cut.group
        assert cut.observe(at, after) == (cut.group != before)
        at = after
        places.append(cut.group)
    # As soon as the bottom has settled, so has what was to and fro all along.
    assert set(places[:25]) == {""} and places[-1] == "head" and set(places) == {"", "head"}
