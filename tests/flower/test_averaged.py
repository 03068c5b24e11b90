"""The mean of the global models is what is tested and returned; clients train the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from scripted_clients import first_arrays, manifest, scripts
from small_federation import (
    as_record,
    as_weights,
    assert_identical,
    quiet,
    run,
    scripted_app,
)

from fl_elastic.aggregation import SERVER_OPTIMIZERS, ModelAverage
from fl_elastic.errors import CheckpointError
from fl_elastic.flower import Checkpointed, PartialUpdates


def trained(strategy: Any, rounds: int = 4, **options: Any) -> Result:
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    return run(strategy, apps, first_arrays(), rounds, **options)[0]


def averaging(decay: float = 0.6) -> PartialUpdates:
    return PartialUpdates(quiet(), average=ModelAverage(decay))


def test_tests_and_result_are_the_mean_of_what_clients_train() -> None:
    newest: list[dict[str, np.ndarray]] = []
    means: list[dict[str, np.ndarray]] = []

    def look(into: list[dict[str, np.ndarray]]) -> Any:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            into.append(as_weights(arrays))
            return None

        return evaluate

    # Clients of the second run train the same models: the mean does not sway the training.
    trained(PartialUpdates(quiet()), evaluate_fn=look(newest))
    result = trained(averaging(), evaluate_fn=look(means))
    expected, changed = ModelAverage(0.6), 0
    for server_round, model in enumerate(newest):
        expected.add(model)
        for name, value in expected.weights().items():
            np.testing.assert_array_equal(means[server_round][name], value)
            changed += int(not np.array_equal(value, model[name]))
    assert changed
    assert_identical(result.arrays, as_record(expected.weights()))


def test_a_checkpoint_with_a_mean_is_not_resumed_without(tmp_path: Path) -> None:
    trained(Checkpointed(averaging(), tmp_path), 1)
    with pytest.raises(CheckpointError, match="ModelAverage"):
        trained(Checkpointed(PartialUpdates(quiet()), tmp_path), 2)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi", "agreement"])
def test_a_second_run_begins_without_what_the_first_one_kept(optimizer: str) -> None:
    def strategy() -> PartialUpdates:
        return PartialUpdates(
            quiet(), server_optimizer=SERVER_OPTIMIZERS.make(optimizer), average=ModelAverage(0.6)
        )

    used, expected = strategy(), trained(strategy())
    for _ in range(3):
        assert_identical(trained(used).arrays, expected.arrays)
