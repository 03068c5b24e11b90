"""Differential privacy around partial updates, and the strategies that refuse them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import (
    UpdateOf,
    Weights,
    as_weights,
    assert_close,
    quiet,
    run,
    scripted_app,
)

from fl_elastic.aggregation import SERVER_OPTIMIZERS, MergeOptions
from fl_elastic.errors import RegistryError, SettingError
from fl_elastic.flower import PartialUpdates, RoundConfig, RoundRecord
from fl_elastic.update import PartialUpdate


def fixed(clipping_norm: float, noise: float = 0.0, clients: int = 4) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(quiet(), noise, clipping_norm, clients)


def merged(
    strategy: Strategy, by_node: dict[int, UpdateOf], rounds: int = 1, **options: object
) -> ArrayRecord:
    apps = {node: scripted_app(manifest(), update) for node, update in by_node.items()}
    return run(PartialUpdates(strategy, **options), apps, first_arrays(), rounds)[0].arrays  # type: ignore[arg-type]


def clipped_mean(by_node: dict[int, UpdateOf], clipping_norm: float) -> Weights:
    """By hand: clip the norm of each client's whole delta, then weigh by examples."""
    start = first_weights()
    total = {name: np.zeros(array.shape) for name, array in start.items()}
    for node, update_of in by_node.items():
        deltas = update_of(start, 1).deltas
        norm = np.sqrt(sum(np.square(delta, dtype=np.float64).sum() for delta in deltas.values()))
        for name, delta in deltas.items():
            total[name] += EXAMPLES[node] * min(1.0, clipping_norm / norm) * delta
    examples = sum(EXAMPLES.values())
    return {name: np.asarray(start[name] + total[name] / examples, np.float32) for name in start}


@pytest.mark.parametrize("everything", [True, False], ids=["dense", "partial"])
def test_without_noise_and_clipping_it_is_the_rule_for_all(everything: bool) -> None:
    by_node = scripts(everything)
    found = merged(fixed(clipping_norm=1e9), by_node, rounds=3)
    assert_close(found, merged(quiet(), by_node, rounds=3, rule="all"), atol=1e-6)


@pytest.mark.parametrize("everything", [True, False], ids=["dense", "partial"])
@pytest.mark.parametrize("clipping_norm", [0.05, 0.3])
def test_each_clients_whole_delta_is_clipped(everything: bool, clipping_norm: float) -> None:
    by_node = scripts(everything)
    found = merged(fixed(clipping_norm), by_node)
    assert_close(found, clipped_mean(by_node, clipping_norm), rtol=1e-5, atol=1e-6)
    moved = np.sqrt(sum(
        np.square(array - first_weights()[name]).sum() for name, array in as_weights(found).items()
    ))  # fmt: skip
    assert 0 < moved <= clipping_norm


def test_noise_reaches_every_parameter_and_only_its_size_is_random() -> None:
    found = as_weights(merged(fixed(0.3, noise=1.0), scripts()))
    quiet_one = as_weights(merged(fixed(0.3), scripts()))
    for name, array in found.items():
        noise = np.abs(array - quiet_one[name])
        assert noise.max() > 0, name
        assert noise.max() < 6 * 0.3 / 4, name


def adaptive(clipping_norm: float) -> DifferentialPrivacyServerSideAdaptiveClipping:
    return DifferentialPrivacyServerSideAdaptiveClipping(
        quiet(), 0.0, num_sampled_clients=4, initial_clipping_norm=clipping_norm
    )


def test_adaptive_clipping_clips_the_same_and_learns_its_norm() -> None:
    strategy, by_node = adaptive(0.3), scripts()
    assert_close(merged(strategy, by_node), clipped_mean(by_node, 0.3), rtol=1e-5, atol=1e-6)
    assert strategy.clipping_norm != 0.3


@pytest.mark.parametrize("strategy", [fixed(0.3), adaptive(0.3)], ids=["fixed", "adaptive"])
def test_a_round_of_bad_replies_only_changes_nothing(strategy: Strategy) -> None:
    by_node: dict[int, UpdateOf] = {
        node: lambda weights, version: PartialUpdate({}, {}, 1, version + 7) for node in EXAMPLES
    }
    records: list[RoundRecord] = []
    found = merged(strategy, by_node, rounds=2, on_round=records.append)
    assert not found
    assert [len(record.rejected) for record in records] == [4, 4]


def test_a_server_optimizer_may_stand_inside() -> None:
    strategy = DifferentialPrivacyServerSideFixedClipping(
        quiet(FedAdam, eta=0.05, tau=0.01), 0.0, 1e9, 4
    )
    by_node = scripts()
    expected = merged(quiet(FedAdam, eta=0.05, tau=0.01), by_node, rounds=2, rule="all")
    assert_close(merged(strategy, by_node, rounds=2), expected, rtol=2e-5, atol=2e-6)


def test_a_bad_reply_is_left_out_and_the_others_are_clipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_node = scripts()
    good = {node: by_node[node] for node in (1, 2, 4)}

    def stale(weights: Weights, version: int) -> PartialUpdate:
        update = by_node[3](weights, version)
        return PartialUpdate(update.deltas, update.steps, update.num_examples, version + 1)

    found = merged(fixed(0.3), {**good, 3: stale})
    start, total = first_weights(), sum(EXAMPLES[node] for node in good)
    scale = sum(EXAMPLES.values()) / total
    by_hand = clipped_mean(good, 0.3)
    expected = {
        name: np.asarray(start[name] + scale * (array - start[name]), np.float32)
        for name, array in by_hand.items()
    }
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert "reply of node 3 left out" in caplog.text


def test_an_update_that_changes_nothing_does_not_end_the_run() -> None:
    """Flower's clipping divides by the norm of the delta."""
    records: list[RoundRecord] = []
    by_node: dict[int, UpdateOf] = {
        **scripts(),
        2: lambda weights, version: PartialUpdate({}, {}, EXAMPLES[2], version),
        3: lambda weights, version: PartialUpdate(
            {"scale": np.zeros((), np.float32)}, {"scale": 1}, EXAMPLES[3], version
        ),
    }
    found = as_weights(merged(fixed(0.3), by_node, on_round=records.append))
    assert [each.node_id for each in sorted(records[0].rejected, key=lambda r: r.node_id)] == [2, 3]
    assert all("changes nothing" in each.reason for each in records[0].rejected)
    assert np.abs(found["head.weight"] - first_weights()["head.weight"]).max() > 0.001


@pytest.mark.parametrize("rule", ["contributors"])
@pytest.mark.parametrize(
    "strategy",
    [
        fixed(1.0),
        adaptive(1.0),
    ],
    ids=["fixed", "adaptive"],
)
def test_another_rule_is_refused(strategy: Strategy, rule: str) -> None:
    with pytest.raises(SettingError, match="use rule 'all'") as refused:
        PartialUpdates(strategy, rule=rule)
    assert "\n" not in str(refused.value)
    assert PartialUpdates(strategy, rule="all").rule == PartialUpdates(strategy).rule == "all"


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_strategies_that_are_no_mean_are_refused(kind: type[FedAvg], wrapped: bool) -> None:
    options = {"client_learning_rate": 0.1} if kind is QFedAvg else {}
    strategy: Strategy = quiet(kind, **options)
    if wrapped:
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, 4)
    with pytest.raises(SettingError, match=kind.__name__) as refused:
        PartialUpdates(strategy)
    assert "not a linear mean" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "strategy",
    [
        DifferentialPrivacyClientSideFixedClipping(quiet(), 0.0, 1.0, 4),
        DifferentialPrivacyClientSideAdaptiveClipping(quiet(), 0.0, 4),
    ],
    ids=["fixed", "adaptive"],
)
def test_client_side_privacy_is_refused(strategy: Strategy) -> None:
    with pytest.raises(SettingError, match="use the server-side wrapper") as refused:
        PartialUpdates(strategy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "ignored",
    [
        {"server_optimizer": SERVER_OPTIMIZERS.make("momentum")},
        {"merge": MergeOptions(weighting="uniform")},
        {"merge": MergeOptions(normalise_steps=True)},
        {"merge": MergeOptions(late="merge")},
    ],
)
def test_settings_without_effect_on_single_replies_are_refused(ignored: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="no effect under differential privacy"):
        PartialUpdates(fixed(1.0), **ignored)
    assert PartialUpdates(quiet(), **ignored)


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"read": "last"}, "or sums_privacy"),
        ({"forget": 3}, "forget=False"),
        ({"cut": "moving"}, "cut='fixed:"),
    ],
)
def test_settings_that_the_noise_does_not_cover_are_refused(
    config: dict[str, Any], instead: str
) -> None:
    with pytest.raises(SettingError, match=f"differential privacy does not cover.*{instead}"):
        PartialUpdates(fixed(1.0), config=RoundConfig(**config))
    assert PartialUpdates(fixed(1.0), config=RoundConfig(cut="fixed:6"))


def test_an_unknown_rule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RegistryError, match="did you mean 'contributors'"):
        PartialUpdates(quiet(), rule="contributor")


def test_the_summary_names_the_wrapper_and_what_is_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        PartialUpdates(fixed(1.0)).summary()
    assert "rule all" in caplog.text
    assert "DP settings" in caplog.text
