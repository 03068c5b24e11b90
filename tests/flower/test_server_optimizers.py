"""Server optimisers of Flower on merged partial updates: what they would make of complete replies."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import SERVERS as FLOWERS
from small_federation import (
    Completed,
    UpdateOf,
    Weights,
    as_record,
    as_weights,
    assert_close,
    assert_identical,
    quiet,
    run,
    scripted_app,
    silent_app,
)

from fl_elastic.aggregation import SERVER_OPTIMIZERS, MergeOptions
from fl_elastic.flower import PartialUpdates
from fl_elastic.update import Manifest, PartialUpdate

SERVERS: dict[str, Callable[[], FedAvg]] = {
    **FLOWERS,
    "fedavgm-slow": lambda: quiet(FedAvgM, server_momentum=0.9, server_learning_rate=0.5),
    "fedprox": lambda: quiet(FedProx, proximal_mu=0.1),
}


def elastic(server: str, rule: str, by_node: dict[int, UpdateOf], rounds: int) -> ArrayRecord:
    apps = {node: scripted_app(manifest(), update) for node, update in by_node.items()}
    return run(PartialUpdates(SERVERS[server](), rule=rule), apps, first_arrays(), rounds)[0].arrays


def reference(server: str, rule: str, by_node: dict[int, UpdateOf], rounds: int) -> ArrayRecord:
    apps = {node: silent_app() for node in by_node}
    strategy = Completed(SERVERS[server](), by_node, rule)
    return run(strategy, apps, first_arrays(), rounds)[0].arrays


@pytest.mark.parametrize(("everything", "rule"), [(True, "contributors"), (False, "all")])
@pytest.mark.parametrize("server", SERVERS)
def test_merged_updates_drive_the_server_like_complete_replies(
    server: str, everything: bool, rule: str
) -> None:
    by_node = scripts(everything)
    found = elastic(server, rule, by_node, rounds=4)
    expected = reference(server, rule, by_node, rounds=4)
    # Adaptive servers divide by the root of a squared mean: differences in the last digit grow.
    assert_close(found, expected, rtol=2e-5, atol=2e-6)
    start = first_weights()
    assert all(np.abs(as_weights(found)[name] - start[name]).max() > 0.01 for name in ("scale",))


def test_rules_differ_on_partial_updates() -> None:
    by_node = scripts()
    one = as_weights(elastic("fedavg", "contributors", by_node, 1))
    other = as_weights(elastic("fedavg", "all", by_node, 1))
    start = first_weights()
    share = EXAMPLES[1] / sum(EXAMPLES.values())
    full, damped = (each["stem.weight"] - start["stem.weight"] for each in (one, other))
    np.testing.assert_allclose(damped, share * full, atol=1e-6)
    assert np.abs(full - damped).max() > 0.05
    np.testing.assert_allclose(other["head.weight"], one["head.weight"], rtol=1e-6)


@pytest.mark.parametrize("server", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_server_state_is_kept_over_rounds(server: str) -> None:
    """Three rounds in one run are not three runs of one round."""
    by_node = scripts()
    together = elastic(server, "contributors", by_node, 3)
    arrays = first_arrays()
    for server_round in range(1, 4):
        apps = {
            node: scripted_app(
                manifest(),
                lambda weights, version, node=node, r=server_round: _at(by_node[node], weights, r),
            )
            for node in by_node
        }
        arrays = run(PartialUpdates(SERVERS[server]()), apps, arrays, 1)[0].arrays
    kept, fresh = as_weights(together), as_weights(arrays)
    assert np.abs(kept["head.weight"] - fresh["head.weight"]).max() > 1e-4


def _at(update_of: UpdateOf, weights: dict[str, np.ndarray], server_round: int):  # type: ignore[no-untyped-def]
    """The update of another round, under the version that this run expects."""
    update = update_of(weights, server_round)
    return type(update)(update.deltas, update.steps, update.num_examples, 1)


@pytest.mark.parametrize("server", SERVERS)
def test_a_tensor_that_nobody_trained_stays(server: str) -> None:
    found = as_weights(elastic(server, "contributors", scripts(), 3))
    assert found["untouched"].tobytes() == first_weights()["untouched"].tobytes()


def test_fedprox_tells_clients_its_coefficient() -> None:
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    _, grid = run(PartialUpdates(SERVERS["fedprox"]()), apps, first_arrays())
    config = grid.sent[0].content.config_records["fitins.config"]
    assert config["proximal-mu"] == 0.1


@pytest.mark.parametrize("server", ["fedavg", "fedavgm"])
@pytest.mark.parametrize("optimizer", [None, "momentum", "adam"])
def test_a_round_that_cannot_be_merged_moves_nothing_along_earlier_rounds(
    server: str, optimizer: str | None
) -> None:
    last = float(np.finfo(np.float16).max)

    def update(weights: Weights, version: int) -> PartialUpdate:
        delta = {"w": np.array([0.2 * last, 1.0] if version == 2 else [0.0, 1.0], np.float32)}
        return PartialUpdate(delta, {"w": 1}, 1, version)

    momentum = {"server_momentum": 0.9} if server == "fedavgm" else {}
    start = {"w": np.array([0.9 * last, 0.0], np.float16)}
    apps = {node: scripted_app(Manifest.of_arrays(start), update) for node in (1, 2)}

    def after(rounds: int) -> ArrayRecord:
        strategy = PartialUpdates(
            quiet(FedAvgM if server == "fedavgm" else FedAvg, 2, **momentum),
            merge=MergeOptions(size_bound=math.inf),
            server_optimizer=None if optimizer is None else SERVER_OPTIMIZERS.make(optimizer),
        )
        return run(strategy, apps, as_record(start), rounds)[0].arrays

    assert_identical(after(2), after(1))
    assert as_weights(after(1))["w"][1] > 0
