"""ProgFed: a shallow part of the model first, and more of its blocks from stage to stage."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.early_exits import EarlyExits, with_exits
from fl_elastic_simulations.peers.window import Window
from fl_elastic_simulations.peers.window_costs import WindowCosts
from fl_elastic_simulations.peers.window_training import train_window

__all__ = ["ProgFed", "stage_fronts", "stage_windows"]

_STAGES = 4
_ROUNDS_PER_STAGE = 15
_WARM_UP_ROUNDS = 1


@register_peer("progfed")
class ProgFed(Peer):
    """Train the first blocks under a head of their own, and every so many rounds some blocks more.

    After ProgFed (Wang et al., ICML 2022), "-style". From the paper: four stages of equally many more blocks; each
    but the last has a light head on what its blocks give, and nothing behind it is run or sent; a stage begins with
    rounds of its new blocks and head alone, and goes on with all of its blocks, so that nothing stays frozen;
    averages weighed by the clients' data. The published settings grow each time an eighth of the 3000 rounds is
    over, and warm up for a fifteenth of that. Assumed: as the number of rounds is not known beforehand where the
    time is, a stage but the last has 15 rounds, the first of which warms it up; the learning rate is constant
    instead of a cosine; warming up counts as rounds; blocks are layers of a chain and units of a residual network;
    a head is the mean over positions and a linear layer. The paper knows no deadline: where a round does not fit,
    it takes fewer steps. How long a step of the stage takes is seen as it is trained, so that nothing is chosen.
    The model is tested under its stage's head.
    """

    rule = "contributors"
    weighting = "examples"
    sends_changes = True
    own_heads = True

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model with an exit behind each block; its own tensors keep their names."""
        return with_exits(model, loss_fn, batch)

    def as_tested(self, model: nn.Module, server_round: int) -> AbstractContextManager[None]:
        """Give the scores of the round's stage inside."""
        exits = _with_exits(model)
        front, _ = stage_windows(len(exits.ends), max(server_round, 1))
        return exits.left_after(front.front)

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the round's stage."""
        model = _with_exits(task.model)
        costs = WindowCosts(task.profile, model.ends)
        _, trained = stage_windows(len(model.ends), task.server_round)
        return train_window(task, model, costs, trained, costs.mask(trained))


def _with_exits(model: nn.Module) -> EarlyExits:
    if not isinstance(model, EarlyExits):
        raise ModelError("progfed trains a model with early exits: call prepare first")
    return model


def stage_fronts(ends: int) -> tuple[int, ...]:
    """Return the last block of each stage, counted from the input; of the last stage the model's last.

    Parameters
    ----------
    ends : int
        Blocks besides the last one, which is the model's own head.

    Examples
    --------
    >>> stage_fronts(4), stage_fronts(8), stage_fronts(1)
    ((0, 1, 2, 4), (1, 3, 5, 8), (0, 1))
    """
    early = {math.ceil(ends * stage / _STAGES) - 1 for stage in range(1, _STAGES)}
    return (*sorted(early), ends)


def stage_windows(ends: int, server_round: int) -> tuple[Window, Window]:
    """Return the blocks that a round runs, and those of them that it trains.

    Parameters
    ----------
    ends : int
        As in `stage_fronts`.
    server_round : int
        From 1.

    Examples
    --------
    >>> [trained for _, trained in map(stage_windows, [4] * 3, [15, 16, 17])]
    [Window(end=0, front=0), Window(end=1, front=1), Window(end=0, front=1)]
    """
    fronts = stage_fronts(ends)
    stage = min((server_round - 1) // _ROUNDS_PER_STAGE, len(fronts) - 1)
    into = server_round - 1 - stage * _ROUNDS_PER_STAGE
    front = fronts[stage]
    warms_up = stage > 0 and into < _WARM_UP_ROUNDS
    return Window(0, front), Window(fronts[stage - 1] + 1 if warms_up else 0, front)
