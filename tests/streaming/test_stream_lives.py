"""A learner that is closed and killed at random goes on as one that never was, whatever comes to it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless
from toy_streams import CENTRES, adam, closed, in_memory, learner_state, net

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamError
from fl_elastic.streaming import Guard, Latent, SampleStore, StreamLearner, Trigger
from fl_elastic.streaming.stream_options import Replay, StreamOptions
from fl_elastic.training import Timing, TrainerOptions

Act = Callable[[StreamLearner], Any]
REPLAYS = [None, Replay(8), Replay(8, 0.7), Replay(stored_share=0.0), Replay(6, 1.0)]


class Early(Guard):
    """Compares as soon as there is one sample."""

    least = 1


class Strict(Guard):
    """Accepts no fall beyond chance."""

    tolerance = 0.0


GUARDS = [Guard(), Early(every=2, size=3), Strict(every=3, size=5)]
NONSENSE = [np.full(6, np.nan), np.zeros(5), np.zeros(0), "x", np.full(6, 1e30)]


@dataclass(frozen=True)
class Settings:
    """Of a learner, drawn at random; what it takes depends on no clock."""

    draw: random.Random

    def maker(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], StreamLearner]:
        """Return what makes such a learner in a folder, which keeps few or many samples in mind."""
        one = self.draw.choice
        latent, outputs, dropout = one([None, None, 1, 2]), one([2, 3]), one([0.0, 0.2])
        store: dict[str, Any] = {
            "capacity_bytes": one([2**17, 2**20]), "encoding": one(["raw", "raw", "fp16", "int8"]),
            "policy": one(["reservoir", "class_balanced"]),
        }  # fmt: skip
        options = StreamOptions(
            steps=one([1, 4]), save_every=one([0, 1, 7, 40]), most_classes=one([2, 3, 1000]),
            training=TrainerOptions(timing=Timing(closed_loop=False)),
        )  # fmt: skip
        for name, counts in {
            "guard._NEW": [5, 60, 512],
            "guard._WAITING": [3, 50, 10_000],
            "arrivals._NAMES": [2, 1000],
        }.items():
            monkeypatch.setattr(f"fl_elastic.streaming.{name}", one(counts))
        settings: dict[str, Any] = {
            "policy": one(["full", "head", "elastic", "bias", "last_k"]), "replay": one(REPLAYS),
            "detector": one(["none", "adwin"]),
            "trigger": Trigger(one([10, 25, 50]), 5), "guard": one(GUARDS),
            "latent": latent and Latent(latent), "seed": one(range(3)),
        }  # fmt: skip

        def made(folder: Path) -> StreamLearner:
            return StreamLearner(
                net(outputs, dropout), SampleStore(folder / "samples.db", **store), state_dir=folder,
                budget=Budget(), optimizer_fn=adam, options=options, **settings,
            )  # fmt: skip

        return made


def acts(draw: random.Random, many: int) -> Iterator[Act]:
    """What is done to a learner; two classes more and another world after a while."""
    numbers = np.random.default_rng(draw.randrange(10**6))

    def sample(label: int, turn: int) -> np.ndarray:
        return (CENTRES[(label + turn) % 8] + numbers.normal(size=6)).astype(np.float32)

    for i in range(many):
        turn, label = 3 * (i > 0.6 * many), draw.randrange(3 if 2 * i < many else 4)
        x, y, k = sample(label, turn), draw.choice([label, label, label, None, -1]), draw.random()
        # What was refused before any sample made sense is not known to a later life.
        if k < 0.55 or i == 0:
            yield lambda it, x=x, y=y: it.observe(x, y)
        elif k < 0.6:
            bad, odd = draw.choice([*NONSENSE, x]), draw.choice([0, None, 2.5])
            yield lambda it, x=bad, y=odd: it.observe(x, y)
        elif k < 0.73:
            labels = [draw.randrange(3) for _ in range(draw.choice([1, 3, 12]))]
            xs = [sample(each, turn) for each in labels]
            ys = [draw.choice([each, None]) for each in labels]
            names = draw.choice([None, [f"n{draw.randrange(60)}" for _ in labels]])
            yield lambda it, xs=xs, ys=ys, names=names: it.observe_batch(xs, ys, names=names)
        elif k < 0.9:
            which = draw.choice([draw.randrange(1, i + 3), f"n{draw.randrange(60)}"])
            told = draw.choice([0, 1, 2, 2, 5, -1, "a"])
            yield lambda it, which=which, told=told: it.label(which, told)
        elif k < 0.95:
            yield draw.choice(
                [lambda it: it.adapt() is None, lambda it: it.save(), lambda it: it.tick()]
            )
        else:
            gone = [draw.randrange(1, i + 2) for _ in range(draw.choice([1, 3]))]
            some = draw.choice([gone, None])
            yield lambda it, some=some, y=label: told_of(it, some or it.ids_of(y))


def told_of(learner: StreamLearner, ids: list[int]) -> Any:
    """What forgetting says, but for sums that are rounded."""
    try:
        done = learner.forget(ids)
    except StreamError as error:
        return str(error)
    return done.examples, done.deleted


def born_again(learner: StreamLearner, folder: Path, ends: str) -> None:
    """Leave in a folder what a life leaves that ends here: closed, or killed, which takes nothing but memory."""
    if ends == "closed":
        closed(learner)
    shutil.copytree(learner._folder.path, folder)
    if ends == "killed":
        closed(learner)


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 4, range(200)))
def test_many_lives_are_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    made = Settings(draw).maker(monkeypatch)
    all_acts = [*acts(draw, 100)]
    one, lives = made(tmp_path / "one"), 0
    many = made(tmp_path / "many-0")
    for place, act in enumerate(all_acts):
        assert str(act(many)) == str(act(one)), f"at {place}, in life {lives}"
        if draw.random() < 0.08:
            lives += 1
            folder = tmp_path / f"many-{lives}"
            born_again(many, folder, draw.choice(["closed", "killed"]))
            many = made(folder)
            many.tick()
    assert lives
    weights, progress, _, *others = learner_state(many)
    expected, expected_progress, _, *expected_others = learner_state(one)
    assert progress == expected_progress and others == expected_others
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-4)
    assert_same_samples(many, one)
    closed(many)
    closed(one)


def assert_same_samples(one: StreamLearner, other: StreamLearner) -> None:
    """Both hold out the same, wait for the same, and learn from the same next."""
    told = [in_memory(each) for each in (one, other)]
    assert told[0].keys() == told[1].keys()
    for name, value in told[0].items():
        np.testing.assert_allclose(value, told[1][name], atol=1e-5, err_msg=name)
