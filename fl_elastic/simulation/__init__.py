"""The pure parts of a simulated federation: scenario, data, partition, batches and models."""

from __future__ import annotations

from fl_elastic.simulation.batches import Batches
from fl_elastic.simulation.datasets import Dataset, load_dataset
from fl_elastic.simulation.models import build_model, resolve_model
from fl_elastic.simulation.partition import partition_indices
from fl_elastic.simulation.scenario import Client, Scenario

__all__ = [
    "Batches",
    "Client",
    "Dataset",
    "Scenario",
    "build_model",
    "load_dataset",
    "partition_indices",
    "resolve_model",
]
