"""Names that code from outside calls: they stay where they are, and take what they took."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

# Each with the arguments that callers name or count on, in their order.
NAMES = {
    "fl_elastic.Budget": ["speedup", "deadline", "memory", "uplink"],
    "fl_elastic.ElasticTrainer": ["model", "loss_fn", "optimizer_fn", "budget", "policy"],
    "fl_elastic.ElasticTrainer.fit": ["self", "loader", "epochs"],
    "fl_elastic.ElasticTrainer.update": ["self"],
    "fl_elastic.ElasticClient": ["model", "train_loader", "test_loader", "budget", "policy"],
    "fl_elastic.groups.tensor_groups": ["model", "loss_fn", "batch"],
    "fl_elastic.groups.TensorGroup": [],
    "fl_elastic.profiling.profile_model": ["model", "loss_fn", "batch", "optimizer_fn"],
    "fl_elastic.planning.policies": [],
    "fl_elastic.planning.Selection": [],
    "fl_elastic.planning.prefix_knapsack": [
        "update_cost", "path_cost", "importance", "budget", "forced", "resolution",
    ],
    "fl_elastic.update.Manifest.of": ["model"],
    "fl_elastic.update.PartialUpdate": ["deltas", "steps", "num_examples", "base_version"],
    "fl_elastic.update.UpdateError": [],
    "fl_elastic.update.encode": ["update", "manifest", "codec"],
    "fl_elastic.update.decode": ["data", "manifest"],
    "fl_elastic.aggregation.PartialMean": ["manifest", "rule"],
    "fl_elastic.aggregation.PartialMean.add": ["self", "update"],
    "fl_elastic.aggregation.PartialMean.finish": ["self", "base"],
    "fl_elastic.flower.PartialUpdates": ["inner"],
    "fl_elastic.streaming.SampleStore": ["path", "capacity_bytes"],
    "fl_elastic.streaming.SampleStore.add": ["self", "x", "y"],
    "fl_elastic.streaming.SampleStore.sample": ["self", "n"],
    "fl_elastic.streaming.SampleStore.delete": ["self", "ids"],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there_and_takes_what_it_took(name: str) -> None:
    found = pkgutil.resolve_name(name)
    wanted = NAMES[name]
    if wanted:
        takes = list(inspect.signature(found).parameters)
        assert [each for each in takes if each in wanted] == wanted


def test_an_error_of_a_payload_is_a_value_error() -> None:
    assert issubclass(pkgutil.resolve_name("fl_elastic.update.UpdateError"), ValueError)
