"""Samples observed together against samples observed one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toy_streams import blobs, closed, in_memory, learner_in, net, same, weights

from fl_elastic.errors import StreamError
from fl_elastic.streaming import (
    DriftDetector,
    Guard,
    Latent,
    Observation,
    Replay,
    StreamLearner,
    Trigger,
)

Reading = tuple[Any, Any]
NEVER = Trigger(10**6, None)


class Alarming(DriftDetector):
    """Sees a drift in every 53rd error."""

    def __init__(self) -> None:
        self._errors = 0

    def update(self, error: float) -> bool:
        """Return whether this is one."""
        self._errors += error > 0
        return self._errors == 53


def readings(count: int, seed: int = 0) -> list[Reading]:
    """A stream with new classes now and then, samples without a label, and all that can be wrong with one."""
    generator = np.random.default_rng(seed)
    stream: list[Reading] = []
    for number, (x, y) in enumerate(blobs(count, range(5), seed)):
        label = None if generator.random() < 0.2 else y if number > count // 2 else y % 3
        stream.append((x, label))
    wrong: list[Reading] = [
        (np.full(6, np.nan, np.float32), 0), (np.zeros(5, np.float32), 1), (stream[0][0], 1.5),
        (stream[0][0], "cat"), ("no sample", 0), (None, None), ([[1.0], [2.0, 3.0]], 1),
        (np.array([1e300] * 6), 1), (stream[0][0], 10**12),
    ]  # fmt: skip
    for each in wrong * 3:
        stream.insert(int(generator.integers(1, len(stream))), each)
    return stream


def one_by_one(learner: StreamLearner, stream: list[Reading]) -> list[Observation]:
    return [learner.observe(*each) for each in stream]


def together(learner: StreamLearner, stream: list[Reading], size: int) -> list[Observation]:
    seen: list[Observation] = []
    for start in range(0, len(stream), size):
        seen += learner.observe_batch(*zip(*stream[start : start + size], strict=True))
    return seen


def assert_alike(first: StreamLearner, second: StreamLearner) -> None:
    """Everything that training does not change is the same, and numbers of the model are close."""
    assert first.progress == second.progress
    assert first.classes == second.classes
    assert first.store.seen == second.store.seen and first.store.classes == second.store.classes
    stored = [each.store.take(range(1, each.store.seen + 1)) for each in (first, second)]
    for name in ("ids", "y"):
        assert np.array_equal(getattr(stored[0], name), getattr(stored[1], name)), name
    np.testing.assert_allclose(stored[0].x, stored[1].x, atol=1e-5)
    one, two = (in_memory(each) for each in (first, second))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], atol=1e-5, err_msg=name)
    assert same(weights(first), weights(second))


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"replay": Replay(6, 1.0)}, {"capacity": 2**17}, {"latent": Latent(1)}, {"detector": Alarming},
        {"guard": Guard(every=2, size=4)}, {"most_classes": 4},
    ],
    ids=str,
)  # fmt: skip
def test_without_training_in_between_it_is_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    stream = readings(400)
    first = learner_in(tmp_path / "one", net(2), trigger=NEVER, **settings)
    seen = one_by_one(first, stream)
    assert sum(first.progress.rejected.values()) >= 27
    if settings.get("detector"):
        assert first.progress.drifts > 3
    for size in (7, 1000):
        second = learner_in(tmp_path / str(size), net(2), trigger=NEVER, **settings)
        assert together(second, stream, size) == seen
        assert_alike(first, second)
        closed(second)
    closed(first)


def test_where_the_trigger_falls_on_the_ends_of_batches_even_training_is_the_same(
    tmp_path: Path,
) -> None:
    stream = blobs(200)
    first, second = (
        learner_in(tmp_path / name, net(3), trigger=Trigger(50, None)) for name in ("one", "many")
    )
    seen = one_by_one(first, stream), together(second, stream, 25)
    assert seen[0] == seen[1] and sum(each.adapted for each in seen[0]) == 4
    assert same(weights(first), weights(second))
    closed(first)
    closed(second)


def test_predictions_of_a_batch_come_before_its_training(tmp_path: Path) -> None:
    stream = blobs(200)
    learner = learner_in(tmp_path, trigger=Trigger(50, None))
    learner.observe_batch(*zip(*stream[:100], strict=True))
    expected = learner.observe_batch([x for x, _ in stream[100:]])
    learner.close()
    learner.store.close()
    again = learner_in(tmp_path, trigger=Trigger(50, None))
    seen = again.observe_batch(*zip(*stream[100:], strict=True))
    # Two times fifty samples, and one adaptation after the last of them.
    assert [each.prediction for each in seen] == [each.prediction for each in expected]
    assert [each.adapted for each in seen] == [False] * 99 + [True]
    assert again.progress.adaptations == 2
    closed(again)


def test_the_last_ones_may_be_refused(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=Trigger(10, None))
    stream = [*blobs(10), ("bad", 0), ("bad", 0)]
    seen = learner.observe_batch(*zip(*stream, strict=True))
    assert [each.adapted for each in seen] == [False] * 9 + [True] + [False] * 2
    assert all(each.refused for each in learner.observe_batch(["bad"], [0]))
    assert learner.observe_batch([]) == [] and learner.progress.adaptations == 1
    closed(learner)


def test_the_state_is_saved_once_in_a_batch_that_passes_its_time(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=NEVER, save_every=20)
    saves = []
    plain = learner.save
    learner.save = lambda: saves.append(learner.progress.observed) or plain()  # type: ignore[method-assign, func-returns-value]
    stream = [(x, 0) for x, _ in blobs(90)]
    learner.observe(*stream[0])
    saves.clear()
    together(learner, stream[1:], 30)
    assert saves == [31, 61, 90]
    closed(learner)


class Words(nn.Module):
    """Takes whole numbers below ten."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Class scores of the mean word."""
        scores: torch.Tensor = self.head(self.table(words).mean(1))
        return scores


def test_one_that_the_model_does_not_take_costs_itself_alone(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, Words(), trigger=NEVER)
    batch = [np.array([1, n], np.int64) for n in (1, 2, 99, 3, 4)]
    seen = learner.observe_batch(batch, [0, 1, 2, 2, 0])
    assert [bool(each.refused) for each in seen] == [False, False, True, False, False]
    assert learner.progress.observed == 4 and learner.store.seen == 4
    closed(learner)


def test_lengths_that_do_not_fit(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    x = np.zeros((3, 6), np.float32)
    for given in ((x, [1, 2]), (5,), (x, 1)):
        with pytest.raises(StreamError):
            learner.observe_batch(*given)
    assert learner.progress.observed == 0
    assert len(learner.observe_batch(torch.zeros(3, 6), [0, None, 1])) == 3
    assert learner.progress.labelled == 2
    assert len(learner.observe_batch(torch.zeros(3, 6), torch.tensor([0, -1, 1]))) == 3
    assert learner.progress.labelled == 5 and learner.classes == (0, 1, -1)
    closed(learner)


def test_the_array_of_a_sample_may_be_used_again(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=NEVER, guard=Guard(every=2))
    buffer = np.zeros(6, np.float32)
    for number in range(8):
        buffer[:] = number
        learner.observe(buffer, 0)
    arrays = in_memory(learner)
    assert arrays["new.x"][:, 0].tolist() == [0, 2, 4, 6]
    assert arrays["held.x"][:, 0].tolist() == [1, 3, 5, 7]
    closed(learner)


def test_a_full_disk_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    learner.observe_batch(*zip(*[(x, None) for x, _ in blobs(30)], strict=True))
    connection = learner.store._database.connection
    kept = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {kept}")
    seen = learner.observe_batch(*zip(*[(x, None) for x, _ in blobs(300)], strict=True))
    # What the store cannot take is known all the same: its label may come.
    assert [each.sample_id for each in seen] == list(range(31, 331))
    lost = learner.store.rejected["disk"]
    assert lost and learner.progress.observed == 330 and learner.store.seen == 330 - lost
    connection.execute("PRAGMA max_page_count = 100000")
    assert learner.observe(blobs(1)[0][0]).sample_id == 331
    assert learner.store.seen == 331 - lost
    closed(learner)
