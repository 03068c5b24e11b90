"""The client of a fleet's node that learns from a stream of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from fl_elastic.errors import FleetError
from fl_elastic.flower.node_app import NodeConfig
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.streaming.replay import Replay
from fl_elastic_simulations.scenario.scenario import TrainingSection

__all__ = ["stream_client"]


def stream_client(
    settings: NodeConfig, training: TrainingSection, model: nn.Module, steps: int, common: Any
) -> StreamClient:
    """Return a client that trains on the samples of the learner that runs beside the node.

    Which folder that is, is the node's own setting; the server has no say in it.

    Parameters
    ----------
    settings : NodeConfig
        With a folder of a stream.
    training : TrainingSection
        Of the scenario: batch size, epochs.
    model : nn.Module
        The scenario's, whose outputs stand for the classes 0, 1, 2 and so on.
    steps : int
        Batches of one epoch.
    common : dict
        What it has in common with any other client.

    Raises
    ------
    FleetError
        If the node has no such folder.
    """
    if settings.stream_dir is None:
        raise FleetError("this node has no stream: set stream-state-dir")
    return StreamClient(
        model, settings.stream_dir,
        joining=settings.joining, seed=settings.partition,
        replay=Replay(training.batch_size), steps=steps * training.local_epochs, **common,
    )  # fmt: skip
