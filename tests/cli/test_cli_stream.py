"""``fl-elastic stream``: a table learned from, twice; a service that is stopped; how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fl_elastic.cli.stream import stream
from fl_elastic.errors import ElasticError

MODELS = """
from torch import nn


def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
APP = typer.Typer()
APP.command()(stream)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stream_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=300)
    x = generator.normal(size=(300, 4)) + 3 * labels[:, None]
    rows = [",".join(f"{v:.4f}" for v in each) + f",{y}" for each, y in zip(x, labels, strict=True)]
    rows[7] = "a,b,c,d,0"
    (tmp_path / "table.csv").write_text("a,b,c,d,label\n" + "\n".join(rows) + "\n")
    yield tmp_path
    sys.modules.pop("stream_models", None)


def arguments(place: Path, *more: str) -> list[str]:
    return [
        "--source", f"csv:{place}/table.csv", "--model", "stream_models:tiny", "--input", "2,2",
        "--state-dir", str(place / "state"), "--policy", "full", "--detector", "none",
        "--every", "50", "--learning-rate", "0.02", *more,
    ]  # fmt: skip


def call(*given: str) -> Any:
    ended = CliRunner().invoke(APP, list(given), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout) if "--json" in given else ended.stdout


def test_a_table_in_two_goes(place: Path) -> None:
    first = call(*arguments(place, "--json", "--limit", "150"))
    assert first["observed"] == 149 and sum(first["refused"].values()) == 1
    assert first["adaptations"] == 2 and sorted(first["classes"]) == [0, 1]
    second = call(*arguments(place, "--json"))
    assert second["observed"] == 299 and second["adaptations"] == 5
    assert second["prequential_accuracy"] > 0.9 and second["store_bytes"] > 0
    assert sum(second["stored"].values()) > 200
    # There is nothing new.
    assert "299 samples, 299 labelled, 1 refused" in call(*arguments(place))


def test_features_and_mains(place: Path) -> None:
    found = call(*arguments(place, "--json", "--latent", "1", "--on-mains", "--replay", "der_pp"))
    assert found["observed"] == 299 and found["prequential_accuracy"] > 0.7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--input", "2,x"], "not a shape"),
        (["--learning-rate", "0"], "learning rate"),
        (["--source", "csv:none"], "there is no table"),
        (["--model", "stream_models:none"], "none"),
        (["--speedup", "0.5"], "below 1"),
        (["--detector", "adwinn"], "did you mean"),
        (["--capacity", "10"], "too small"),
    ],
)
def test_one_clear_line(given: list[str], message: str, place: Path) -> None:
    with pytest.raises(ElasticError, match=message):
        call(*arguments(place, *given))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_is_stopped_has_saved(number: int, place: Path) -> None:
    command = "import typer; from fl_elastic.cli.stream import stream; typer.run(stream)"
    service = subprocess.Popen(
        [sys.executable, "-c", command, *arguments(place, "--follow", "--json")],
        cwd=place, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not (place / "state" / "learner.npz").exists() and time.monotonic() < end:
            time.sleep(0.05)
        service.send_signal(number)
        told, _ = service.communicate(timeout=60)
    finally:
        service.kill()
    assert service.returncode == 0
    said = json.loads(told)
    assert said["observed"] >= 1
    handled = said["observed"] + sum(said["refused"].values())
    again = call(*arguments(place, "--json", "--limit", "1"))
    assert again["observed"] + sum(again["refused"].values()) == min(handled + 1, 300)
