"""The pack of JPEG images: decoded once, kept in the cache, made again when it does not fit."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data import files
from fl_elastic_simulations.data.files import decoded_jpegs

SHAPE = (32, 32, 3)


def _pack(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        encoded.append(buffer.getvalue())
    offsets = np.cumsum([0, *[len(one) for one in encoded]])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def _write(path: Path, shades: list[int], **changes: npt.NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.stack([np.full(SHAPE, shade, np.uint8) for shade in shades])
    arrays: dict[str, npt.NDArray[Any]] = {}
    for split in ("train", "test"):
        arrays[f"jpeg_{split}"], arrays[f"off_{split}"] = _pack(images)
        arrays[f"y_{split}"] = np.arange(len(shades), dtype=np.uint8)
    np.savez(path, **(arrays | changes))  # type: ignore[arg-type]
    return path


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Write a pack of three even images, black, grey and white."""
    return _write(tmp_path / "pack" / "pack.npz", [0, 128, 255])


def _shades(arrays: dict[str, npt.NDArray[Any]]) -> list[int]:
    return [int(image.mean().round()) for image in arrays["x_train"]]


def _forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded although the cache holds it")

    monkeypatch.setattr(files, "decode_jpegs", fail)


def test_images_are_decoded_in_order(pack: Path) -> None:
    arrays = decoded_jpegs("pack", pack, SHAPE)
    assert _shades(arrays) == [0, 128, 255]
    assert arrays["x_test"].shape == (3, *SHAPE)
    assert arrays["y_train"].tolist() == [0, 1, 2]


def test_the_second_time_comes_from_the_cache(
    pack: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decoded_jpegs("pack", pack, SHAPE)
    assert [path.name for path in own_cache.iterdir()] == ["pack.npz"]
    _forbid_decoding(monkeypatch)
    second = decoded_jpegs("pack", pack, SHAPE)
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_a_changed_source_is_decoded_again(pack: Path) -> None:
    decoded_jpegs("pack", pack, SHAPE)
    _write(pack, [10, 20, 30])
    os.utime(pack, ns=(1, 1))
    assert _shades(decoded_jpegs("pack", pack, SHAPE)) == [10, 20, 30]


@pytest.mark.parametrize("content", [b"", b"rubbish", None])
def test_a_damaged_cache_is_made_again(pack: Path, own_cache: Path, content: bytes | None) -> None:
    decoded_jpegs("pack", pack, SHAPE)
    cached = own_cache / "pack.npz"
    whole = cached.read_bytes()
    cached.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert _shades(decoded_jpegs("pack", pack, SHAPE)) == [0, 128, 255]
    assert len(cached.read_bytes()) == len(whole)


def test_without_a_place_for_the_cache_there_is_a_warning_only(pack: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="decoded again by the next run"):
        arrays = decoded_jpegs("pack", pack, SHAPE)
    assert _shades(arrays) == [0, 128, 255]


def test_a_failed_write_leaves_nothing_behind(
    pack: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoded_jpegs("pack", pack, SHAPE)
    assert list(own_cache.iterdir()) == []


def test_an_image_that_is_damaged_or_of_another_size_is_refused(tmp_path: Path) -> None:
    broken, offsets = np.zeros(30, np.uint8), np.array([0, 10, 20, 30])
    path = _write(tmp_path / "a.npz", [1, 2, 3], jpeg_test=broken, off_test=offsets)
    with pytest.raises(DatasetError, match=r"a\.npz is damaged"):
        decoded_jpegs("pack", path, SHAPE)
    with pytest.raises(DatasetError, match=r"image 0 has shape \(32, 32, 3\)"):
        decoded_jpegs("pack", _write(tmp_path / "b.npz", [1]), (16, 16, 3))


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
