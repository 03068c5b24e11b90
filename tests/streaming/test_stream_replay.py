"""Batches of new and stored samples, and the losses that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import chain, same_weights, sgd, weights_of
from torch.nn.functional import cross_entropy

from fl_elastic.budget import Budget
from fl_elastic.errors import RegistryError, StreamError
from fl_elastic.streaming import SampleStore, replay_loader
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.replay import REPLAYS, DarkReplay, ExperienceReplay, Part, Replay
from fl_elastic.streaming.replay_loader import Pool, ReplayLoader
from fl_elastic.training import ElasticTrainer

CLASSES = ClassMap((7, 3, 5))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    with SampleStore(tmp_path / "s.db", 2**20) as made:
        yield made


def fill(store: SampleStore, count: int, told: int = 3) -> None:
    """Samples whose numbers are negative, with class scores that say which they are."""
    for number in range(1, count + 1):
        store.add(
            np.full(6, -number, np.float32), CLASSES.label(number % 3), float(number),
            outputs=np.full(told, number, np.float32) if told else None,
        )  # fmt: skip


def pool_of(store: SampleStore, new: int) -> Pool:
    x = np.arange(1, new + 1, dtype=np.float32)[:, None].repeat(6, 1)
    y = np.array([CLASSES.label(i % 3) for i in range(1, new + 1)], np.int64)
    return Pool(x, y, store, CLASSES)


def loader_of(pool: Pool, replay: Replay, steps: int = 4, seed: int = 0) -> ReplayLoader:
    return ReplayLoader(pool, replay, steps, (seed,), torch.from_numpy)


def test_names() -> None:
    assert REPLAYS.names() == ["der_pp", "er", "none"]
    assert REPLAYS.make("none").parts == (Part(32, stored=False),)
    with pytest.raises(RegistryError, match="did you mean"):
        REPLAYS.make("der")


@pytest.mark.parametrize("new", [50, 0])
@pytest.mark.parametrize("name", REPLAYS.names())
def test_reading_ahead_changes_no_batch(
    name: str, new: int, store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 60)
    loader = loader_of(pool_of(store, new), REPLAYS.make(name), steps=7)
    ahead = list(loader)
    monkeypatch.setattr(replay_loader, "_AHEAD_BYTES", 0)
    for (x, y), (other_x, other_y) in zip(ahead, loader, strict=True):
        assert torch.equal(x, other_x)
        if not isinstance(y, dict):
            assert torch.equal(y, other_y)
        else:
            assert all(torch.equal(y[key].nan_to_num(), other_y[key].nan_to_num()) for key in y)


@pytest.mark.parametrize("left", [0, 3])
def test_samples_that_vanish_while_they_are_read_are_made_up_for(
    left: int, store: SampleStore
) -> None:
    fill(store, 60)
    loader = loader_of(pool_of(store, 5), ExperienceReplay(), steps=6)
    batches = iter(loader)
    next(batches)
    store.delete(ids=range(left + 1, 61))
    rest = list(batches)
    assert len(rest) == 5 and all(len(x) == loader.dataset_size // 6 for x, _ in rest)
    assert {float(x) for x in rest[-1][0][:, 0] if x < 0} <= {-1.0, -2.0, -3.0}


@pytest.mark.parametrize("name", REPLAYS.names())
@pytest.mark.parametrize(("new", "stored"), [(50, 50), (3, 2), (0, 20), (20, 0)])
def test_every_batch_is_whole_and_labels_are_right(
    name: str, new: int, stored: int, store: SampleStore
) -> None:
    fill(store, stored)
    replay = REPLAYS.make(name)
    loader = loader_of(pool_of(store, new), replay)
    batches = list(loader)
    assert len(batches) == len(loader) == 4 and loader.dataset_size == 4 * replay.batch_size
    for inputs, targets in batches:
        outputs = targets["outputs"] if isinstance(targets, dict) else targets
        assert inputs.shape == (replay.batch_size, 6) and outputs.shape == (replay.batch_size,)
        assert outputs.tolist() == (inputs[:, 0].abs().long() % 3).tolist()


@pytest.mark.parametrize("name", REPLAYS.names())
def test_reading_again_gives_the_same_batches_and_another_seed_others(
    name: str, store: SampleStore
) -> None:
    fill(store, 60)
    pool, replay = pool_of(store, 40), REPLAYS.make(name)
    loader = loader_of(pool, replay)
    first, second, other = list(loader), list(loader), list(loader_of(pool, replay, seed=1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_shares_of_new_and_stored(store: SampleStore) -> None:
    fill(store, 60)
    replay = ExperienceReplay(rows=8, stored_share=0.25)
    for inputs, _ in loader_of(pool_of(store, 40), replay):
        assert (inputs[:6, 0] > 0).all() and (inputs[6:, 0] < 0).all()
        # No sample twice while there are enough.
        assert len(set(inputs[:, 0].tolist())) == 8


def test_nothing_to_learn_from_is_said(store: SampleStore) -> None:
    with pytest.raises(StreamError, match="no labelled sample"):
        next(iter(loader_of(pool_of(store, 0), ExperienceReplay())))


def test_only_samples_of_the_wished_version(store: SampleStore) -> None:
    fill(store, 10, told=0)
    store.add(np.full(6, -100, np.float32), CLASSES.label(1), 1.0, version="new")
    pool = Pool(np.zeros((0, 6), np.float32), np.zeros(0, np.int64), store, CLASSES, "new")
    inputs, _ = next(iter(loader_of(pool, ExperienceReplay(rows=4))))
    assert (inputs == -100).all()


def test_old_scores_come_with_their_samples(store: SampleStore) -> None:
    fill(store, 20, told=2)
    fill_more = np.full(6, -21, np.float32)
    store.add(fill_more, CLASSES.label(0), outputs=np.full(3, 21, np.float32))
    store.add(np.full(6, -22, np.float32), CLASSES.label(1))
    seen = set()
    for inputs, targets in loader_of(pool_of(store, 9), DarkReplay(rows=8), steps=20):
        numbers, told = -inputs[8:16, 0], targets["told"]
        assert torch.isnan(told[:8]).all() and torch.isnan(told[16:]).all()
        for number, scores in zip(numbers.tolist(), told[8:16], strict=True):
            seen.add(number)
            known = {21: 3, 22: 0}.get(int(number), 2)
            assert (scores[:known] == number).all() and torch.isnan(scores[known:]).all()
    assert {21.0, 22.0} <= seen


def by_hand(outputs: torch.Tensor, targets: dict[str, torch.Tensor], replay: DarkReplay) -> float:
    """DER++'s loss, term by term."""
    rows, right = replay.rows, targets["outputs"]
    new = sum(float(cross_entropy(outputs[i], right[i])) for i in range(rows)) / rows
    squares = [
        (float(outputs[i, c]) - float(targets["told"][i, c])) ** 2
        for i in range(rows, 2 * rows)
        for c in range(outputs.shape[1])
    ]
    old = sum(float(cross_entropy(outputs[i], right[i])) for i in range(2 * rows, 3 * rows)) / rows
    return new + replay.alpha * sum(squares) / len(squares) + replay.beta * old


def test_the_loss_of_der_is_the_papers(store: SampleStore) -> None:
    fill(store, 30)
    replay = DarkReplay(rows=4, alpha=0.7, beta=0.3)
    for _, targets in loader_of(pool_of(store, 9), replay):
        outputs = torch.randn(12, 3)
        loss = replay.loss(cross_entropy)(outputs, targets)
        assert float(loss) == pytest.approx(by_hand(outputs, targets, replay), rel=1e-5)


def test_the_loss_of_der_is_the_mean_over_single_rows(store: SampleStore) -> None:
    fill(store, 30)
    replay = DarkReplay(rows=4)
    _, targets = next(iter(loader_of(pool_of(store, 9), replay)))
    outputs, loss = torch.randn(12, 3), replay.loss(cross_entropy)
    single = [
        float(loss(outputs[i : i + 1], {k: v[i : i + 1] for k, v in targets.items()}))
        for i in range(12)
    ]
    assert float(loss(outputs, targets)) == pytest.approx(np.mean(single), rel=1e-5)


def test_scores_of_fewer_classes_and_unknown_ones(store: SampleStore) -> None:
    replay = DarkReplay(rows=1, alpha=1.0, beta=0.0)
    targets = {
        "outputs": torch.zeros(3, dtype=torch.long),
        "told": torch.tensor([[torch.nan] * 3, [1.0, 2.0, torch.nan], [torch.nan] * 3]),
        "part": torch.arange(3),
    }
    outputs = torch.tensor([[50.0, 0, 0], [1.0, 4.0, 99.0], [0, 0, 0]], requires_grad=True)
    loss = replay.loss(cross_entropy)(outputs, targets)
    assert loss.item() == pytest.approx(2.0)
    targets["told"] = torch.full((3, 3), torch.nan)
    loss = replay.loss(cross_entropy)(outputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.0) and torch.isfinite(outputs.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REPLAYS.names())
@pytest.mark.parametrize("policy", ["full", "elastic", "tinytrain"])
def test_the_trainer_takes_the_batches(name: str, policy: str, store: SampleStore) -> None:
    fill(store, 60)
    replay, model = REPLAYS.make(name), chain()
    before = weights_of(model)
    trainer = ElasticTrainer(
        model, replay.loss(cross_entropy), sgd, budget=Budget(speedup=1.6), policy=policy
    )
    loader = ReplayLoader(pool_of(store, 40), replay, 3, (0,), lambda x: torch.from_numpy(x) / 60)
    report = trainer.fit(loader)
    assert report.steps >= 1 and np.isfinite(report.loss) and not same_weights(before, model)


def test_what_means_nothing_is_refused() -> None:
    for make in (
        lambda: ExperienceReplay(rows=0),
        lambda: ExperienceReplay(stored_share=1.5),
        lambda: DarkReplay(rows=0),
        lambda: DarkReplay(alpha=0.0),
    ):
        with pytest.raises(StreamError):
            make()
    with pytest.raises(RegistryError):
        ExperienceReplay(how="latest")
