"""A client's own settings in a round, where the server has a say: budget, options, optimiser, codec, features."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.flower.instructions import Instructions
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.training import FleetTerms, ForwardOptions, TrainablePart, TrainerOptions
from fl_elastic.update import CODECS

__all__ = [
    "Configure",
    "budget_as_told",
    "codec_as_told",
    "forward_as_told",
    "optimizer_as_told",
    "options_as_told",
]

_LOG = logging.getLogger("fl_elastic")
Configure = Callable[[torch.optim.Optimizer, dict[str, Any]], object]


def budget_as_told(budget: Budget, told: Instructions, share: float) -> Budget:
    """Return the budget of a round: with the server's deadline, unless the device's own is earlier.

    Parameters
    ----------
    budget : Budget
        Of the device.
    told : Instructions
        With the server's deadline.
    share : float
        Bytes of an update as the codec writes it over those in fp32, which plans count: the way to the server is
        that much faster and wider.

    Examples
    --------
    >>> from fl_elastic import Budget
    >>> budget_as_told(Budget(deadline=20.0, uplink=1e6), Instructions(deadline=10.0), share=0.25)
    Budget(speedup=None, deadline=10.0, memory=None, uplink=4000000.0, bandwidth=None)
    """
    limits = [each for each in (budget.deadline, told.deadline) if each is not None]
    bandwidth, uplink = (
        None if each is None else each / share for each in (budget.bandwidth, budget.uplink)
    )
    return replace(budget, deadline=min(limits, default=None), bandwidth=bandwidth, uplink=uplink)


def options_as_told(options: TrainerOptions, told: Instructions) -> TrainerOptions:
    """Return a client's options with what the server says about the round; the seed is the client's own."""
    return replace(
        options,
        # Where the server chooses, everything is trained only if it says so.
        full_update_every=0 if told.groups else 1 if told.overdue else options.full_update_every,
        fleet=FleetTerms(told.importance_by_group(), told.blend, told.seed),
        part=TrainablePart(
            cut=told.cut or options.part.cut,
            kept_head=told.kept_head or options.part.kept_head,
            keep_statistics=told.keep_statistics or options.part.keep_statistics,
        ),
    )


def optimizer_as_told(
    optimizer_fn: OptimizerFn,
    told: Instructions,
    config: dict[str, Any],
    configure: Configure | None,
) -> OptimizerFn:
    """Return what makes the same optimiser, set as the server says.

    Parameters
    ----------
    optimizer_fn : callable
        Of the client.
    told : Instructions
        With the learning rate, or a factor of it.
    config : dict
        Of the message, for ``configure``.
    configure : callable, optional
        ``configure(optimizer, config)`` sets what else the config says, after the rate and before its factor.
    """
    if configure is None and told.rate == 1.0 and told.lr is None:
        return optimizer_fn

    # As it would be asked for names of parameters.
    @wraps(optimizer_fn)
    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = optimizer_fn(parameters)
        usual = optimizer.defaults.get("lr") if isinstance(optimizer, torch.optim.Optimizer) else 0
        for group in optimizer.param_groups if told.lr is not None and usual else ():
            group["lr"] = told.lr * (group["lr"] / usual)
        if configure is not None:
            configure(optimizer, config)
        for group in optimizer.param_groups if told.rate != 1.0 else ():
            if "lr" in group:
                group["lr"] = told.rate * group["lr"]
        return optimizer

    return made


def codec_as_told(codec: str, told: Instructions) -> str:
    """Return how to write an update: as the server says, where this side knows how, else as the client does."""
    if told.codec and told.codec not in CODECS.names():
        _LOG.warning("the server asks for codec %r, which is not known here", told.codec)
        return codec
    return told.codec or codec


def forward_as_told(forward: ForwardOptions | None, told: Instructions) -> ForwardOptions | None:
    """Return how the frozen prefix runs, with features kept as the server says, where this side knows how."""
    wanted = told.feature_precision
    if forward is None or not wanted:
        return forward
    try:
        return replace(forward, precision=wanted)
    except BudgetError as error:
        _LOG.warning("the server asks for another precision: %s", error)
        return forward
