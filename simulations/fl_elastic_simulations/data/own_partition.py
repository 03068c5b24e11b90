"""Custom partitions: a function, or a partitioner of flwr-datasets, named as ``module:callable``."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import RegistryError, ScenarioError
from fl_elastic.registry import first_line, from_module
from fl_elastic_simulations.data.partition import Indices

_LABEL, _OWNER, _INDEX = "label", "owner", "index"


def dealt(
    labels: npt.NDArray[np.int64],
    clients: int,
    *,
    method: str,
    alpha: float,
    classes_per_client: int,
    seed: int,
    min_examples: int,
    owners: npt.NDArray[np.int64] | None,
) -> list[Indices]:
    """Return each client's indices, by the partition that ``module:callable`` names.

    The callable is called with those of ``labels``, ``owners``, ``clients``, ``seed``, ``alpha``,
    ``classes_per_client`` and ``min_examples`` that its signature names. It returns a list of index arrays, or a
    partitioner of flwr-datasets. It may also be such a partitioner class itself: ``num_partitions``,
    ``partition_by``, ``num_classes_per_partition`` and ``min_partition_size`` are provided as well.

    Raises
    ------
    ScenarioError
        If it fails, or its result is not a split into this many clients.
    """
    try:
        make = from_module("partition", method)
    except RegistryError as error:
        raise ScenarioError(str(error)) from error
    by = _OWNER if "Natural" in getattr(make, "__name__", "") else _LABEL
    offered = {
        "labels": labels, "owners": owners, "clients": clients, "seed": seed, "alpha": alpha,
        "min_examples": min_examples, "classes_per_client": classes_per_client,
        "num_classes_per_partition": classes_per_client, "num_partitions": clients, "partition_by": by,
        "min_partition_size": min_examples,
    }  # fmt: skip
    try:
        asked = inspect.signature(make).parameters.values()
        missing = [
            each.name for each in asked if each.default is each.empty and each.name not in offered
        ]
        if missing:
            raise ScenarioError(
                f"partition {method!r} asks for {missing[0]!r}, which a scenario does not set: name a function of "
                "your own that sets it and returns the partitioner"
            )
        found = make(**{each.name: offered[each.name] for each in asked if each.name in offered})
        parts = _by_partitioner(found, labels, owners) if _is_partitioner(found) else found
        split = [np.sort(np.asarray(part, np.int64)) for part in parts]
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"partition {method!r} failed: {first_line(error)}") from error
    _check(method, split, clients, len(labels), min_examples)
    return split


def _is_partitioner(found: Any) -> bool:
    """Return whether an object is a partitioner of flwr-datasets, without importing that package."""
    theirs = sys.modules.get("flwr_datasets.partitioner")
    return theirs is not None and isinstance(found, theirs.Partitioner)


def _by_partitioner(
    partitioner: Any, labels: npt.NDArray[np.int64], owners: npt.NDArray[np.int64] | None
) -> list[list[int]]:
    from datasets import Dataset

    columns = {_LABEL: labels.tolist(), _INDEX: list(range(len(labels)))}
    if owners is not None:
        columns[_OWNER] = owners.tolist()
    partitioner.dataset = Dataset.from_dict(columns)
    return [partitioner.load_partition(n)[_INDEX] for n in range(partitioner.num_partitions)]


def _check(method: str, split: list[Indices], clients: int, examples: int, smallest: int) -> None:
    if len(split) != clients:
        raise ScenarioError(
            f"partition {method!r} gave {len(split)} parts for {clients} clients: make the fleet as large"
        )
    everything = np.concatenate(split)
    if len(everything) and not 0 <= everything.min() <= everything.max() < examples:
        raise ScenarioError(f"partition {method!r} gave indices outside of 0 to {examples - 1}")
    if len(np.unique(everything)) != len(everything):
        raise ScenarioError(f"partition {method!r} gave an example to two clients")
    poorest = min(range(clients), key=lambda client: len(split[client]))
    if len(split[poorest]) < smallest:
        raise ScenarioError(
            f"partition {method!r} left client {poorest} with {len(split[poorest])} examples, below min_examples "
            f"{smallest}: lower min_examples, or make the fleet smaller"
        )
