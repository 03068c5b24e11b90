"""Packs of JPEG images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.files import decode_jpegs

SHAPE = (32, 32, 3)


def test_images_are_decoded_in_order_and_refused_where_damaged_or_of_another_size() -> None:
    encoded = []
    for shade in (0, 128, 255):
        buffer = io.BytesIO()
        Image.fromarray(np.full(SHAPE, shade, np.uint8)).save(buffer, "JPEG", quality=95)
        encoded.append(buffer.getvalue())
    packed = np.frombuffer(b"".join(encoded), np.uint8)
    offsets = np.cumsum([0, *map(len, encoded)])
    path = Path("a.npz")
    images = decode_jpegs("pack", path, packed, offsets, SHAPE)
    assert [int(image.mean().round()) for image in images] == [0, 128, 255]
    with pytest.raises(DatasetError, match=r"image 0 has shape \(32, 32, 3\)"):
        decode_jpegs("pack", path, packed, offsets, (16, 16, 3))
    with pytest.raises(DatasetError, match=r"a\.npz is damaged"):
        decode_jpegs("pack", path, np.zeros(30, np.uint8), np.array([0, 10, 20, 30]), SHAPE)


def test_the_real_pack_has_the_documented_layout(data_root: Path, tmp_path: Path) -> None:
    source = data_root / "cifar10_jpegq75" / "cifar10_jpegq75.npz"
    with np.load(source, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    few = {}
    for split in ("train", "test"):
        offsets = arrays[f"off_{split}"][:41]
        few[f"off_{split}"] = offsets
        few[f"jpeg_{split}"] = arrays[f"jpeg_{split}"][: offsets[-1]]
        few[f"y_{split}"] = arrays[f"y_{split}"][:40]
    path = tmp_path / "cifar10_jpegq75" / "cifar10_jpegq75.npz"
    path.parent.mkdir()
    np.savez(path, **few)
    from fl_elastic_simulations.data.datasets import load_dataset

    dataset = load_dataset("cifar10_jpegq75", tmp_path)
    assert dataset.train_x.shape == (40, 3, 32, 32)
    assert dataset.train_x.std() == pytest.approx(1, abs=0.3)
    assert dataset.test_y.dtype == np.int64
