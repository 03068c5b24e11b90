"""What the wire loses in one round arrives in a later one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_elastic.errors import UpdateError
from fl_elastic.update import CODECS, Manifest, PartialUpdate, decode, encode
from fl_elastic.update.feedback import ErrorFeedback
from fl_elastic.update.manifest import Role
from fl_elastic.update.parts import Masks

MANIFEST = Manifest(
    ("conv", "bias", "mean", "file"),
    ((4, 3, 2, 2), (40,), (5,), ()),
    ("float32",) * 4,
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.PARAMETER),
)
lossy = pytest.mark.parametrize("codec", ["topk", "int8", "bf16", "fp16"])
rows = np.array([True, False, True, False])


def update_of(generator: np.random.Generator, names: Any = MANIFEST.names) -> PartialUpdate:
    deltas = {
        name: np.asarray(generator.standard_normal(MANIFEST.shape(name)), np.float32)
        for name in names
    }
    return PartialUpdate(deltas, dict.fromkeys(deltas, 1), 5, 1)


def partly(update: PartialUpdate, masks: Masks) -> PartialUpdate:
    conv = update.deltas["conv"] * rows[:, None, None, None]
    return replace(update, deltas=update.deltas | {"conv": conv}, parts={"conv": masks})


def one_round(feedback: ErrorFeedback, update: PartialUpdate, codec: str) -> PartialUpdate:
    corrected = feedback.corrected(replace(update, base_version=feedback.version + 1))
    data = encode(corrected, MANIFEST, codec)
    received = decode(data, MANIFEST)
    feedback.sent(corrected, received)
    return received


@lossy
@settings(max_examples=10)
@given(seed=st.integers(0, 999))
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_learnt_but_for_the_residual(
    codec: str, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    feedback = ErrorFeedback(manifest=MANIFEST)
    learnt = {name: np.zeros(MANIFEST.shape(name)) for name in MANIFEST.names}
    arrived = {name: np.zeros(MANIFEST.shape(name)) for name in MANIFEST.names}
    for step in range(60):
        names = [name for name in MANIFEST.names if generator.random() < 0.8]
        update = update_of(generator, names)
        if "conv" in names and step % 3 == 0:
            update = partly(update, (rows, None, None, None))
        received = one_round(feedback, update, codec)
        for name in names:
            learnt[name] += update.deltas[name]
            arrived[name] += received.deltas[name]
    for name in ("conv", "bias", "file"):
        residual = feedback.residuals.get(name, np.zeros(1))
        assert np.abs(learnt[name] - arrived[name] - residual).max() < 1e-3
    assert "mean" not in feedback.residuals


@lossy
def test_the_residual_stays_bounded(codec: str) -> None:
    generator = np.random.default_rng(3)
    feedback = ErrorFeedback(manifest=MANIFEST)
    steady = update_of(generator)
    sizes = []
    for _ in range(300):
        noisy = {name: d + generator.normal(0, 0.1, d.shape) for name, d in steady.deltas.items()}
        one_round(feedback, replace(steady, deltas=noisy), codec)
        sizes.append(max(np.abs(r).max() for r in feedback.residuals.values()))
    assert max(sizes[150:]) < 1.2 * max(sizes[:150])
    # Of 48 numbers 3 are sent at a time: each waits for about 16 rounds of its own change.
    largest = max(float(np.abs(delta).max()) for delta in steady.deltas.values())
    assert max(sizes) < 30 * largest


@given(seed=st.integers(0, 99), parts=st.booleans())
def test_fp32_leaves_no_residual(seed: int, parts: bool) -> None:
    update = update_of(np.random.default_rng(seed))
    if parts:
        update = partly(update, (rows, None, None, None))
    feedback = ErrorFeedback()
    received = one_round(feedback, update, "fp32")
    assert feedback.residuals == {}
    assert all(np.array_equal(received.deltas[n], d) for n, d in update.deltas.items())
    # Nor do wider numbers, which no codec sees.
    wide = {name: delta.astype(np.float64) / 3 for name, delta in update.deltas.items()}
    one_round(feedback, replace(update, deltas=wide), "fp32")
    assert feedback.residuals == {}


@pytest.mark.parametrize("codec", CODECS.names())
def test_running_statistics_keep_no_residual(codec: str) -> None:
    feedback = ErrorFeedback(manifest=MANIFEST)
    one_round(feedback, update_of(np.random.default_rng(1)), codec)
    assert "mean" not in feedback.residuals
    assert bool(feedback.residuals) is CODECS.make(codec).lossy


def test_only_what_is_trained_now_is_corrected_and_the_rest_is_kept() -> None:
    generator = np.random.default_rng(2)
    feedback = ErrorFeedback(manifest=MANIFEST)
    one_round(feedback, update_of(generator), "topk")
    before = {name: residual.copy() for name, residual in feedback.residuals.items()}
    assert set(before) == {"conv", "bias"}
    update = partly(update_of(generator, ["conv"]), (rows, None, None, None))
    corrected = feedback.corrected(update)
    expected = update.deltas["conv"] + before["conv"] * rows[:, None, None, None]
    assert np.allclose(corrected.deltas["conv"], expected) and corrected.parts == update.parts
    assert not corrected.deltas["conv"][~rows].any()
    feedback.sent(corrected, decode(encode(corrected, MANIFEST, "fp32"), MANIFEST))
    # The trained rows arrived whole; the others, and the other tensor, still wait.
    assert not feedback.residuals["conv"][rows].any()
    assert np.array_equal(feedback.residuals["conv"][~rows], before["conv"][~rows])
    assert np.array_equal(feedback.residuals["bias"], before["bias"])


def test_correcting_leaves_the_update_and_the_residuals_alone() -> None:
    generator = np.random.default_rng(2)
    feedback = ErrorFeedback()
    one_round(feedback, update_of(generator), "topk")
    update = update_of(generator)
    deltas = {name: delta.copy() for name, delta in update.deltas.items()}
    kept = {name: residual.copy() for name, residual in feedback.residuals.items()}
    corrected = feedback.corrected(update)
    for delta in corrected.deltas.values():
        delta[...] = 0
    assert all(np.array_equal(feedback.residuals[name], kept[name]) for name in kept)
    for name in kept:
        assert np.array_equal(update.deltas[name], deltas[name])


def test_a_failed_writing_changes_no_residual() -> None:
    generator = np.random.default_rng(4)
    feedback = ErrorFeedback()
    one_round(feedback, update_of(generator), "topk")
    kept = dict(feedback.residuals)
    bad = update_of(generator)
    bad.deltas["bias"][3] = np.nan
    with pytest.raises(UpdateError):
        one_round(feedback, bad, "topk")
    corrected = feedback.corrected(bad)
    with pytest.raises(UpdateError, match="not finite"):
        feedback.sent(corrected, corrected)
    with pytest.raises(UpdateError, match="differ in the tensors"):
        feedback.sent(corrected, update_of(generator, ["bias"]))
    with pytest.raises(UpdateError, match="arrived as"):
        wrong = {"bias": np.zeros(2, np.float32)}
        feedback.sent(update_of(generator, ["bias"]), replace(bad, deltas=wrong))
    assert feedback.residuals.keys() == kept.keys()
    assert all(feedback.residuals[name] is kept[name] for name in kept)


def test_residuals_of_another_shape_are_refused() -> None:
    feedback = ErrorFeedback({"bias": np.zeros(3, np.float32)})
    with pytest.raises(UpdateError, match="residual of 'bias' has shape"):
        feedback.corrected(update_of(np.random.default_rng(0)))


@pytest.mark.parametrize("version", [0, 3])
def test_what_another_run_lost_is_not_added(version: int, tmp_path: Path) -> None:
    """The rounds of a new run start from earlier versions, as those after the server went back do."""
    generator, path = np.random.default_rng(7), tmp_path / "residuals.state"
    first, update = ErrorFeedback(manifest=MANIFEST), update_of(generator)
    for _ in range(4):
        one_round(first, update_of(generator), "topk")
    assert first.version == 3 and first.save(path)
    for feedback in (first, ErrorFeedback.load(path, MANIFEST)):
        assert feedback.residuals and feedback.version == 3
        again = feedback.corrected(replace(update, base_version=version))
        assert all(np.array_equal(again.deltas[n], d) for n, d in update.deltas.items())
        feedback.sent(again, decode(encode(again, MANIFEST, "topk"), MANIFEST))
        new = ErrorFeedback(manifest=MANIFEST)
        one_round(new, update, "topk")
        assert feedback.version == version and feedback.residuals.keys() == new.residuals.keys()
        assert all(np.array_equal(feedback.residuals[n], r) for n, r in new.residuals.items())


def test_residuals_are_kept_in_a_file(tmp_path: Path) -> None:
    feedback = ErrorFeedback(manifest=MANIFEST)
    generator = np.random.default_rng(6)
    one_round(feedback, update_of(generator), "int8")
    feedback.residuals["file"] = np.array(0.5, np.float32)
    path = tmp_path / "state" / "residuals.state"
    assert feedback.save(path)
    back = ErrorFeedback.load(path, MANIFEST)
    assert back.residuals.keys() == feedback.residuals.keys()
    for name, residual in feedback.residuals.items():
        assert back.residuals[name].shape == MANIFEST.shape(name)
        assert np.array_equal(back.residuals[name], residual)
    one_round(back, update_of(generator), "fp16")
    assert "mean" not in back.residuals
    assert ErrorFeedback().save(path) and ErrorFeedback.load(path, MANIFEST).residuals == {}


def saved(tmp_path: Path, residuals: dict[str, Any]) -> Path:
    path = tmp_path / "residuals.state"
    assert ErrorFeedback(residuals, version=2).save(path)
    return path


@pytest.mark.parametrize(
    "residuals",
    [
        {"other": np.zeros(40, np.float32)},
        {"bias": np.zeros(41, np.float32)},
        {"bias": np.zeros(40, np.float64)},
        {"bias": np.full(40, np.nan, np.float32)},
        {"mean": np.zeros(5, np.float32)},
        {"bias": np.zeros(100_000, np.float32)},
    ],
    ids=["name", "shape", "dtype", "NaN", "statistic", "large"],
)
def test_residuals_of_another_model_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, residuals: dict[str, Any]
) -> None:
    path = saved(tmp_path, {"conv": np.ones((4, 3, 2, 2), np.float32), **residuals})
    assert ErrorFeedback.load(path, MANIFEST).residuals == {}
    assert "are not used" in caplog.text


def test_a_full_disk_is_logged_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fl_elastic.state.archive.write_atomically", full)
    assert ErrorFeedback().save(tmp_path / "residuals.state") is False
    assert "No space left" in caplog.text
