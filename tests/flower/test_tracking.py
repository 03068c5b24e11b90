"""Numbers of rounds in TensorBoard, MLflow and Weights & Biases, where they are installed, and for anybody else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg
from small_federation import arrays_of, build, elastic_client, run

from fl_elastic.errors import SettingError
from fl_elastic.flower import PartialUpdates, elastic_client_app
from fl_elastic.flower.tracking import RoundMetrics, to_mlflow, to_tensorboard, to_wandb


def federated(on_round: Any, rounds: int = 2) -> None:
    apps = {
        node: elastic_client_app(lambda context, node=node: elastic_client(build(), node))
        for node in (1, 2)
    }
    run(PartialUpdates(FedAvg(), on_round=on_round), apps, arrays_of(build()), rounds)


def test_anybody_gets_the_numbers_of_training_and_testing() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    federated(RoundMetrics(lambda metrics, number: seen.append((number, dict(metrics)))))
    assert [number for number, _ in seen] == [1, 1, 2, 2]
    trained, tested = seen[0][1], seen[1][1]
    assert trained["round/merged"] == 2 and trained["round/rejected"] == 0
    assert trained["round/examples"] == 6 + 18 and trained["round/uplink_bytes"] > 1000
    assert trained["train/loss"] > 0 and "train/steps" in trained
    assert set(tested) >= {"evaluate/loss", "evaluate/accuracy"}
    assert all(isinstance(value, (int, float)) for value in (trained | tested).values())


def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    federated(to_tensorboard(str(tmp_path)))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {"round/merged", "train/loss", "evaluate/accuracy"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]


@pytest.mark.slow
def test_mlflow_reads_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    with mlflow.start_run() as active:
        federated(to_mlflow())
    client = mlflow.MlflowClient(f"file:{tmp_path}/runs")
    kept = client.get_metric_history(active.info.run_id, "train/loss")
    assert [each.step for each in kept] == [1, 2]
    assert client.get_metric_history(active.info.run_id, "evaluate/accuracy")


@pytest.mark.slow
def test_wandb_keeps_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    if not hasattr(wandb, "init"):
        pytest.skip("wandb is not installed: it comes with the extra tracking")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    run_of = wandb.init(mode="offline", project="fleet", dir=str(tmp_path))
    federated(to_wandb(run_of))
    summary = dict(run_of.summary)
    run_of.finish()
    assert summary["round/merged"] == 2 and "evaluate/accuracy" in summary


def test_a_run_of_ones_own_is_enough_for_weights_and_biases() -> None:
    class Run:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, metrics: dict[str, float], step: int) -> None:
            self.steps.append(step)

    run_of = Run()
    federated(to_wandb(run_of), rounds=1)
    assert run_of.steps == [1, 1]


@pytest.mark.parametrize(
    ("module", "make", "word"),
    [
        ("mlflow", to_mlflow, "pip install mlflow-skinny"),
        ("wandb", to_wandb, "pip install wandb"),
        ("torch.utils.tensorboard", lambda: to_tensorboard("x"), "pip install tensorboard"),
    ],
)
def test_what_is_not_installed_says_what_to_install(
    module: str, make: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=word):
        make()
