"""The command that prepares a backbone: from images to a scenario that begins with it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from fl_elastic.errors import DatasetError, ElasticError, ModelError
from fl_elastic.laboratory import COMMANDS
from fl_elastic.update.manifest import base_digest, hex_of
from fl_elastic_simulations.cli.prepare import prepare
from fl_elastic_simulations.data.image_folder import images_of_folder
from fl_elastic_simulations.engine.workload import scenario_model
from fl_elastic_simulations.scenario import Scenario

APP = typer.Typer()
APP.command()(prepare)


def wide() -> nn.Module:
    """A teacher for the digits, which loads its own weights: those of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(1, 256, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, 2),
        )


def thin() -> nn.Module:
    """A student for images in colours."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def thick() -> nn.Module:
    """A teacher for images in colours."""
    return nn.Sequential(
        nn.Conv2d(3, 9, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 2)
    )


def run(*arguments: str) -> dict[str, Any]:
    found = CliRunner().invoke(APP, [*arguments, "--json"])
    if found.exception is not None:
        raise found.exception
    told: dict[str, Any] = json.loads(found.stdout)
    return told


def test_a_scenario_begins_with_what_was_prepared(tmp_path: Path) -> None:
    told = run(
        "digits_cnn_bn", "--teacher", f"{__name__}:wide", "--images", "digits", "--output", str(tmp_path / "b.fle"),
        "--epochs", "2", "--share", "0.5",
    )  # fmt: skip
    assert (told["features"], told["teacher_features"], told["count"]) == (192, 256, 629)
    assert [each.name for each in tmp_path.iterdir()] == ["b.fle"]
    demo = Path(__file__).parents[2] / "scenarios" / "demo.toml"
    scenario = Scenario.load(demo, ["model.name=digits_cnn_bn", "model.weights=b.fle"])
    model = scenario_model(scenario, str(tmp_path), seed=3)
    digest = base_digest(model, ["head.weight", "head.bias"])
    assert digest is not None and hex_of(digest) == told["digest"]


def test_images_may_come_from_a_folder(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(6):
        pixels = generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        (tmp_path / f"of/{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"of/{number % 2}/{number}.png")
    found = images_of_folder(tmp_path / "of", 20)
    assert found.shape == (6, 3, 20, 20)
    middle = np.asarray(Image.open(tmp_path / "of/0/0.png"))[:, 5:25] / 255
    middle = (middle - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(found[0], np.moveaxis(middle, -1, 0), atol=1e-5)
    told = run(
        f"{__name__}:thin", "--teacher", f"{__name__}:thick", "--images", str(tmp_path / "of"), "--output",
        str(tmp_path / "b.fle"), "--epochs", "1", "--batch-size", "3", "--image-size", "16", "--teacher-size", "24",
    )  # fmt: skip
    assert told["count"] == 6 and told["input_shape"] == [3, 16, 16]
    (tmp_path / "of/0/0.png").write_bytes(b"no image")
    with pytest.raises(DatasetError, match="png cannot be read"):
        images_of_folder(tmp_path / "of", 20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="holds no images"):
        images_of_folder(tmp_path / "empty", 20)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"--teacher": "resnet18"}, ModelError, "teaches nothing"),
        ({"--images": "digist"}, DatasetError, "did you mean 'digits'"),
        ({"--images": "har"}, ElasticError, "har"),
        ({"--share": "0.0001"}, DatasetError, "leaves 0"),
        ({"--share": "0.05"}, ModelError, "give at least 192"),
        ({"--teacher-weights": "nowhere.npz"}, DatasetError, "nowhere.npz"),
    ],
    ids=["untaught", "unknown", "no images", "no share", "few images", "no weights"],
)
def test_what_cannot_be_prepared_is_one_line(
    options: dict[str, str], kind: type[Exception], reason: str, tmp_path: Path
) -> None:
    given = {
        "--teacher": f"{__name__}:wide",
        "--images": "digits",
        "--output": str(tmp_path / "b.fle"),
        **options,
    }
    with pytest.raises(kind, match=reason) as caught:
        run("digits_cnn_bn", *(word for pair in given.items() for word in pair))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.fle").exists()


def test_the_command_is_known_where_the_laboratory_is_missing() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    commands = tomllib.loads(project.read_text())["project"]["entry-points"]["fl_elastic.commands"]
    assert set(commands) == set(COMMANDS)
