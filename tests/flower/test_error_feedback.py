"""What a lossy codec loses of one update comes with the next one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import Weights, build, elastic_client

from fl_elastic.flower import ElasticClient
from fl_elastic.flower.forget_request import ForgetRequest
from fl_elastic.flower.records import PACKED
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import encode_weights

ROUNDS = 8


MANIFEST = Manifest.of(build())
PARAMETERS = [name for name in MANIFEST.names if MANIFEST.role(name) is Role.PARAMETER]


def client(codec: str, state_dir: Path | None = None, policy: str = "full") -> ElasticClient:
    return elastic_client(build(), 2, policy, codec=codec, state_dir=state_dir)


def sent(made: ElasticClient) -> Weights:
    """The deltas of the next round, which starts from the first model's weights."""
    version = made.state.feedback.version + 1
    data = encode_weights(weights_of(build(), MANIFEST), MANIFEST, version=version)
    arrays, examples, metrics = made.fit([np.frombuffer(data, np.uint8)], {PACKED: True})
    assert examples == 18, metrics
    return decode(arrays[0].tobytes(), MANIFEST).deltas


def norm(deltas: Weights) -> float:
    return float(np.sqrt(sum(np.square(delta).sum() for delta in deltas.values())))


def feedback_file(directory: Path) -> Path:
    return directory / f"feedback-{MANIFEST.hash}.state"


@pytest.fixture(scope="module")
def exact() -> Weights:
    return sent(client("fp32"))


def in_memory(codec: str, directory: Path) -> Callable[[], Weights]:
    made = client(codec)
    return lambda: sent(made)


def on_disk(codec: str, directory: Path) -> Callable[[], Weights]:
    return lambda: sent(client(codec, directory))


@pytest.mark.parametrize("memory", [in_memory, on_disk])
@pytest.mark.parametrize("codec", ["topk", "int8", "fp16"])
def test_what_was_sent_adds_up_to_what_was_learnt(
    codec: str, memory: Callable[..., Callable[[], Weights]], tmp_path: Path, exact: Weights
) -> None:
    """Every round starts from the same model, so that each learns the same: exact times the rounds."""
    one = memory(codec, tmp_path)
    received = [one() for _ in range(ROUNDS)]
    total = {name: sum(each[name].astype(float) for each in received) for name in PARAMETERS}
    missing = norm({name: ROUNDS * exact[name] - total[name] for name in PARAMETERS})
    lost_each_time = ROUNDS * norm({name: exact[name] - received[0][name] for name in PARAMETERS})
    # Top-k sends few numbers at a time, and is in arrears accordingly.
    assert 0 < missing < {"topk": 0.8}.get(codec, 0.5) * lost_each_time
    assert any(not np.array_equal(received[0][name], received[1][name]) for name in PARAMETERS)


@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_the_second_update_is_corrected_by_what_the_first_one_lost(
    codec: str, exact: Weights
) -> None:
    made = client(codec)
    first = sent(made)
    lost = {name: exact[name] - first[name] for name in PARAMETERS}
    kept = made.state.feedback.residuals
    for name in PARAMETERS:
        np.testing.assert_allclose(
            kept.get(name, np.zeros_like(lost[name])), lost[name], atol=1e-6, err_msg=name
        )
    second = sent(made)
    for name in PARAMETERS:
        whole = exact[name] + lost[name]
        left = made.state.feedback.residuals.get(name, np.zeros_like(whole))
        np.testing.assert_allclose(second[name] + left, whole, atol=1e-6, err_msg=name)


def test_a_second_run_begins_without_what_the_first_one_lost(tmp_path: Path) -> None:
    """The state folder of a client outlives the run, and the weights of the new run are others."""
    first = sent(client("topk", tmp_path))
    sent(client("topk", tmp_path))
    second_run = client("topk", tmp_path)
    data = encode_weights(weights_of(build(), MANIFEST), MANIFEST, version=0)
    arrays, _, _ = second_run.fit([np.frombuffer(data, np.uint8)], {PACKED: True})
    again = decode(arrays[0].tobytes(), MANIFEST).deltas
    assert all(np.array_equal(first[name], again[name]) for name in PARAMETERS if name in first)


def test_statistics_are_not_corrected() -> None:
    made = client("topk")
    sent(made)
    assert set(made.state.feedback.residuals) <= set(PARAMETERS)


def test_a_codec_that_loses_nothing_keeps_nothing(tmp_path: Path) -> None:
    sent(client("fp32", tmp_path))
    assert not feedback_file(tmp_path).exists()


def test_a_tensor_that_is_not_trained_keeps_its_residual(tmp_path: Path) -> None:
    sent(client("topk", tmp_path))
    before = client("topk", tmp_path).state.feedback.residuals
    head = sent(client("topk", tmp_path, policy="head"))
    after = client("topk", tmp_path).state.feedback.residuals
    others = [name for name in before if name not in head]
    assert others
    assert all(np.array_equal(before[name], after[name]) for name in others)


def test_a_full_disk_costs_the_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fl_elastic.state.archive.write_atomically", full)
    first = sent(client("topk", tmp_path))
    assert "No space left on device" in caplog.text
    assert not feedback_file(tmp_path).exists()
    again = sent(client("topk", tmp_path))
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_a_damaged_file_is_forgotten(tmp_path: Path) -> None:
    fresh = sent(client("topk", tmp_path))
    feedback_file(tmp_path).write_bytes(b"PK\x03\x04 not an archive")
    again = sent(client("topk", tmp_path))
    assert all(np.array_equal(fresh[name], again[name]) for name in fresh)
    assert client("topk", tmp_path).state.feedback.residuals


@pytest.mark.parametrize("memory", [True, False])
def test_what_earlier_updates_lost_of_examples_to_be_forgotten_is_not_sent_later(
    memory: bool, tmp_path: Path, exact: Weights
) -> None:
    kept = client("topk", tmp_path)

    def made(wish: Any = None) -> ElasticClient:
        one = kept if memory else client("topk", tmp_path)
        if wish is not None and one.forget_request.examples is None:
            one.forget_request = ForgetRequest.of(wish)
        return one

    first = sent(made())
    assert made().state.feedback.residuals
    # Trained on other examples from now on: the first update after that is as if nothing had been lost before.
    wish = [(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))]
    again = sent(made(wish))
    for name in PARAMETERS:
        assert np.array_equal(first[name], again[name]), name
    # That happens once, however long the server takes to forget them.
    third = sent(made(wish))
    assert any(not np.array_equal(third[name], again[name]) for name in PARAMETERS)
