"""A fleet's cut that moves up from the input as blocks settle, for models that begin at random weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_elastic.flower.fleet_cut import FleetCut
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.window_costs import blocks_between

__all__ = ["Movement", "SettlingBlock", "SettlingCut", "SettlingUpdates", "settling_blocks"]

_LOG = logging.getLogger("fl_elastic")
_Weights: TypeAlias = Mapping[str, NDArray[Any]]

_DECAY = 0.9


@dataclass(frozen=True)
class SettlingBlock:
    """A block that may be frozen once all before it are.

    Attributes
    ----------
    parameters : tuple of str
        Its tensors.
    above : str
        The deepest group that is still trained once it is frozen.
    """

    parameters: tuple[str, ...]
    above: str


def settling_blocks(graph: BackwardGraph) -> tuple[SettlingBlock, ...]:
    """Return all blocks of a model but the last, from the input on: layers of a chain, units of a residual network.

    Parameters
    ----------
    graph : BackwardGraph
        Of a training step.

    Examples
    --------
    >>> import torch
    >>> from fl_elastic.groups.trace import trace_step
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    >>> settling_blocks(trace_step(model, torch.nn.functional.cross_entropy, batch).graph)
    (SettlingBlock(parameters=('0.weight', '0.bias'), above='2'),)
    """
    blocks = blocks_between(block_ends(graph), len(graph.groups))
    return tuple(
        SettlingBlock(
            tuple(name for group in block for name in graph.groups[group].parameters),
            graph.groups[block.start - 1].name,
        )
        for block in blocks[:-1]
    )


class Movement:
    """How much of what rounds change in some tensors goes one way: APF's and SmartFreeze's effective movement.

    The mean of the changes over the mean of their sizes, both exponential. Both are taken per scalar, as in APF's
    published code, and summed over the tensors before they are divided.

    Parameters
    ----------
    names : sequence of str
        The tensors.
    decay : float
        Of the means, between 0 and 1.

    Examples
    --------
    >>> there, back = {"w": np.array([0.0])}, {"w": np.array([1.0])}
    >>> movement = Movement(["w"], decay=0.5)
    >>> movement.observe(there, back)
    >>> movement.observe(back, there)
    >>> round(movement.effective, 4), round(movement.by_chance, 4)
    (0.3333, 0.5774)
    """

    def __init__(self, names: Sequence[str], decay: float = _DECAY) -> None:
        self._names, self._decay = tuple(names), decay
        self._changes: dict[str, NDArray[np.float64]] = {}
        self._sizes: dict[str, NDArray[np.float64]] = {}

    def observe(self, before: _Weights, after: _Weights) -> None:
        """Take in what a round changed."""
        for name in self._names:
            change = np.asarray(after[name], np.float64) - before[name]
            none, kept = np.zeros_like(change), 1 - self._decay
            self._changes[name] = self._decay * self._changes.get(name, none) + kept * change
            self._sizes[name] = self._decay * self._sizes.get(name, none) + kept * np.abs(change)

    @property
    def effective(self) -> float:
        """Between 0 for going to and fro and 1 for going on; infinite where nothing was seen to move."""
        size = sum(float(each.sum()) for each in self._sizes.values())
        moved = sum(float(np.abs(each).sum()) for each in self._changes.values())
        return moved / size if size else math.inf

    @property
    def by_chance(self) -> float:
        """What independent changes give in the long run, where they are normal and all of one size."""
        return math.sqrt((1 - self._decay) / (1 + self._decay))


class SettlingCut(FleetCut):
    """Where the cut lies: above all blocks from the input on that have settled.

    A block has settled once its effective movement is no more than that of changes by chance. It stays frozen.

    Parameters
    ----------
    terms : RoundConfig
        As for a cut that moves.
    blocks : sequence of SettlingBlock
        From the input on.
    """

    def __init__(self, terms: RoundConfig, blocks: Sequence[SettlingBlock]) -> None:
        super().__init__(terms)
        self._blocks = [(block, Movement(block.parameters)) for block in blocks]

    def due(self, server_round: int) -> bool:
        """Say that nobody needs to be asked: the server sees how the model moves."""
        del server_round
        return False

    def observe(self, before: _Weights, after: _Weights) -> bool:
        """Take in a round's change of the model; return whether the cut moved."""
        for _, movement in self._blocks:
            movement.observe(before, after)
        moved = False
        while self._blocks and self._blocks[0][1].effective <= self._blocks[0][1].by_chance:
            block, movement = self._blocks.pop(0)
            _LOG.info("the cut moves up to %s: movement %.3f", block.above, movement.effective)
            self.group, moved = block.above, True
        return moved


class SettlingUpdates(PartialUpdates):
    """Partial updates under a cut that moves up as blocks settle.

    Parameters
    ----------
    blocks : sequence of SettlingBlock
        From the input on.
    inner : Strategy
        As of `PartialUpdates`, like all options.
    """

    def __init__(self, blocks: Sequence[SettlingBlock], inner: Strategy, **options: Any) -> None:
        super().__init__(inner, **options)
        self.fleet.cut = SettlingCut(self.config, blocks)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the updates, and see whether a block has settled."""
        before = self._weights
        found = super().aggregate_train(server_round, replies)
        cut = self.fleet.cut
        if isinstance(cut, SettlingCut) and cut.observe(before, self._weights):
            # What a device needs for a round is what it needs above the cut.
            self.fleet.forget_capabilities()
        return found
