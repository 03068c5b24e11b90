"""The model that a client keeps on disk: back bit for bit, or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import chain, conv_net

from fl_elastic.errors import UpdateError
from fl_elastic.state.archive import Kind, write_archive
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.model_store import ModelStore
from fl_elastic.update.model_wire import decode_weights, encode_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_model_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = conv_net().to(dtype)
    manifest = Manifest.of(model)
    weights = weights_of(model, manifest)
    assert ModelStore(tmp_path / "state" / "model").save(weights, 7)
    held = ModelStore(tmp_path / "state" / "model").load(manifest)
    assert held is not None and held[1] == 7 and list(held[0]) == list(manifest.names)
    for name, array in weights.items():
        assert held[0][name].dtype == array.dtype
        assert held[0][name].tobytes() == array.tobytes()
    # And it is a base for what changed since.
    data = encode_weights(weights, manifest, version=9, since=7, names=set())
    assert decode_weights(data, manifest, held)[1] == 9


def test_a_model_received_in_double_precision_is_kept_as_it_arrived(tmp_path: Path) -> None:
    model = chain().double()
    manifest = Manifest.of(model)
    received, _ = decode_weights(encode_weights(weights_of(model, manifest), manifest), manifest)
    store = ModelStore(tmp_path / "model")
    assert store.save(received, 1)
    held = store.load(manifest)
    assert held is not None
    assert all(held[0][name].tobytes() == array.tobytes() for name, array in received.items())


def test_damaged_and_foreign_files_are_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = chain()
    manifest = Manifest.of(model)
    store = ModelStore(tmp_path / "model")
    assert store.save(weights_of(model, manifest), 3)
    good = store.path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for damaged in (b"", b"hello", good[:-1], good + b"\0", bytes(flipped)):
        caplog.clear()
        store.path.write_bytes(damaged)
        assert store.load(manifest) is None
        assert len(caplog.records) == 1 and "is not used" in caplog.text
    store.path.write_bytes(good)
    assert store.load(Manifest.of(conv_net())) is None
    assert store.load(manifest) is not None
    store.path.unlink()
    store.path.mkdir()
    assert store.load(manifest) is None


LIES: dict[str, Any] = {
    "no version": ({}, {}), "a text": ({"version": "3"}, {}), "true": ({"version": True}, {}),
    "negative": ({"version": -1}, {}), "huge": ({"version": 10**30}, {}),
    "one more": ({"version": 3}, {"x": np.zeros(1, np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_model_that_somebody_wrote_is_none(
    lie: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, kind = chain(), Kind("fl_elastic.model")
    manifest = Manifest.of(model)
    weights, (facts, more) = weights_of(model, manifest), LIES[lie]
    path = write_archive(tmp_path / "model", kind, facts, weights | more)
    assert ModelStore(path).load(manifest) is None and "is not used" in caplog.text
    name = manifest.names[0]
    for wrong in (np.full_like(weights[name], np.nan), weights[name].astype(np.float64),
                  weights[name][None]):  # fmt: skip
        write_archive(path, kind, {"version": 3}, weights | {name: wrong})
        assert ModelStore(path).load(manifest) is None
    # The order of a file is not that of a model.
    write_archive(path, kind, {"version": 3}, dict(reversed(weights.items())))
    held = ModelStore(path).load(manifest)
    assert held is not None and list(held[0]) == list(manifest.names)


def test_a_full_disk_is_logged_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.of(chain())
    weights = weights_of(chain(), manifest)
    store = ModelStore(tmp_path / "model")
    assert store.save(weights, 1)

    def full(*_: Any, **__: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fl_elastic.state.archive.write_atomically", full)
    with caplog.at_level(logging.WARNING):
        assert store.save(weights, 2) is False
    assert "No space left" in caplog.text
    held = store.load(manifest)
    assert held is not None and held[1] == 1


def test_a_model_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "model")
    with pytest.raises(UpdateError):
        store.save({"w": np.array([np.nan], np.float32)}, 1)
    with pytest.raises(UpdateError):
        store.save({"w": np.zeros(1, np.float32)}, -1)
    assert not store.path.exists()
