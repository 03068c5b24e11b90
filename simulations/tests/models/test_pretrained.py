"""Pretrained weights fit or are refused; birds are read from their pack."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.errors import DatasetError, ModelError
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained


def test_what_the_file_lacks_is_named_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    arrays = {
        name: np.random.default_rng(0).normal(size=tuple(tensor.shape)).astype(np.float32)
        for name, tensor in model[:2].state_dict().items() if "num_batches" not in name
    }  # fmt: skip
    np.savez(tmp_path / "weights.npz", **arrays)  # type: ignore[arg-type]
    assert load_pretrained(model, tmp_path / "weights.npz") == ("2.weight", "2.bias")
    for name, array in arrays.items():
        assert torch.equal(model.state_dict()[name], torch.from_numpy(array))


@pytest.mark.parametrize("name", ["0.weight", "elsewhere"])
def test_weights_of_another_model_are_refused(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "weights.npz", **{name: np.zeros((2, 2))})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="take the weights of this model"):
        load_pretrained(nn.Sequential(nn.Linear(3, 3)), tmp_path / "weights.npz")


@pytest.mark.parametrize("content", [None, b"not an archive"])
def test_missing_or_damaged_weights_are_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        load_pretrained(nn.Linear(2, 2), path)
    assert "\n" not in str(caught.value)


def write_birds(root: Path, **changes: Any) -> None:
    from PIL import Image

    parts = []
    for shade in (10, 200, 90):
        buffer = io.BytesIO()
        Image.new("RGB", (128, 128), (shade, shade, shade)).save(buffer, "JPEG")
        parts.append(buffer.getvalue())
    arrays: dict[str, Any] = {
        "jpeg": np.frombuffer(b"".join(parts), np.uint8),
        "off": np.cumsum([0, *map(len, parts)]),
        "y": np.array([0, 7, 49], np.int16),
        "is_train": np.array([1, 0, 1], np.uint8),
    }
    (root / "cub50_128").mkdir()
    np.savez(root / "cub50_128" / "cub50_128.npz", **(arrays | changes))


def test_birds_come_in_their_official_split(tmp_path: Path) -> None:
    write_birds(tmp_path)
    data = load_dataset("cub50", tmp_path)
    assert data.train_x.shape == (2, 3, 128, 128) and data.test_y.tolist() == [7]
    assert data.train_y.tolist() == [0, 49] and data.classes == 50
    expected = (10 / 255 - 0.485) / 0.229
    assert abs(float(data.train_x[0, 0].mean()) - expected) < 0.02


@pytest.mark.parametrize(
    "changes",
    [{"is_train": np.array([1, 0], np.uint8)}, {"jpeg": np.zeros(9, np.uint8)}, {"y": np.array([0, 1, 50])}],
    ids=["lengths", "images", "labels"],
)  # fmt: skip
def test_a_damaged_pack_of_birds_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_birds(tmp_path, **changes)
    with pytest.raises(DatasetError) as caught:
        load_dataset("cub50", tmp_path)
    assert "\n" not in str(caught.value)
