"""The client of a fleet's node that learns from a stream of the node."""

from __future__ import annotations

from typing import Any

from torch import nn

from fl_elastic.errors import FleetError
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.streaming.stream_options import Replay
from fl_elastic_simulations.scenario.sections import TrainingSection


def stream_client(
    settings: NodeConfig, training: TrainingSection, model: nn.Module, steps: int, common: Any
) -> StreamClient:
    """Return a client that trains on the samples of the stream learner that runs beside the node.

    The learner's folder is a setting of the node; the server cannot choose it.

    Parameters
    ----------
    settings : NodeConfig
        Settings of the node, with the folder of a stream.
    training : TrainingSection
        Training section of the scenario: batch size, epochs.
    model : nn.Module
        Model of the scenario; its outputs stand for the classes 0, 1, 2 and so on.
    steps : int
        Number of batches of one epoch.
    common : dict
        Arguments that all kinds of clients share.

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
