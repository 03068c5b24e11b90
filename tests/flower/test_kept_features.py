"""Whatever happens to features that last, a client ends with the weights of one that keeps none."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import arrays_of, as_weights, plain_sgd, quiet, run
from small_models import Batch, images, loss_fn
from torch import Tensor, nn

from fl_elastic import Budget
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    client_round,
    elastic_client_app,
)
from fl_elastic.flower.tasks.train import Train
from fl_elastic.state.rows import Rows, page_for, room_of
from fl_elastic.training import ForwardOptions, Timing, TrainerOptions
from fl_elastic.training.report import ForwardReport

CUT = "4"
Make = Callable[[], nn.Module]
Weights = list[np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_round, "passes_above_cut", lambda *_: 1)


def net(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Three convolutions for images of any size; the cut is below the last one."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), activation(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


def client_of(
    model: nn.Module,
    data: Iterable[Batch],
    folder: Path,
    *,
    keeps: int = 1 << 20,
    precision: str = "fp32",
    tests: Iterable[Batch] = (),
) -> ElasticClient:
    forward = ForwardOptions(feature_bytes=keeps, precision=precision)
    return ElasticClient(
        model, data, list(tests), budget=Budget(), policy="full", loss_fn=loss_fn,
        optimizer_fn=plain_sgd, state_dir=folder,
        options=TrainerOptions(forward=forward, timing=Timing(closed_loop=False)),
    )  # fmt: skip


def trained(
    model: nn.Module, data: Iterable[Batch], folder: Path, cut: str = CUT, **options: Any
) -> tuple[Weights, ForwardReport]:
    """One round in a process of its own, from the model's weights."""
    one = client_of(model, data, folder, **options)
    weights, _, _ = one.fit(one.get_parameters({}), Train(cut=cut).to_config())
    assert one.report is not None and one.report.forward is not None
    return weights, one.report.forward


def check_rounds(
    folder: Path,
    rounds: Sequence[tuple[Make, Iterable[Batch]]],
    cut: str = CUT,
    rounding: float = 0.0,
    **options: Any,
) -> list[ForwardReport]:
    """Train each round with and without features that last; the weights are the same to the bit.

    Where a part of a batch is found only, the rest is computed in a smaller one: up to rounding.
    """
    reports = []
    for make, data in rounds:
        torch.manual_seed(7)
        kept, report = trained(make(), data, folder / "kept", cut, **options)
        torch.manual_seed(7)
        plain, _ = trained(make(), data, folder / "plain", cut, **options | {"keeps": 0})
        for one, other in zip(kept, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
        reports.append(report)
    return reports


class Shifted(nn.Module):
    """Code of its own between modules: a parameter that no module holds."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shift = nn.Parameter(torch.full((1,), shift))
        self.below, self.above = nn.Linear(192, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.above(torch.relu(self.below(x.flatten(1) + self.shift)))
        return out


class Told(Shifted):
    """The same with a buffer of the whole model."""

    def __init__(self, shift: float) -> None:
        super().__init__(0.0)
        self.register_buffer("told", torch.full((1,), shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.told)


class Centred(nn.Module):
    """A buffer that is not saved."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1,), mean), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x - self.mean
        return out


CHANGES: dict[str, tuple[str, Make, Make]] = {
    "a parameter of no module": ("above", lambda: Shifted(0.0), lambda: Shifted(1.0)),
    "a buffer of the whole model": ("above", lambda: Told(0.0), lambda: Told(1.0)),
    "a buffer that is not saved": (
        "5",
        lambda: nn.Sequential(Centred(0.0), *net().children()),
        lambda: nn.Sequential(Centred(1.0), *net().children()),
    ),
    "another activation": (CUT, net, lambda: net(nn.SiLU)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_prefix_that_is_another_is_run_anew(tmp_path: Path, change: str) -> None:
    cut, before, after = CHANGES[change]
    data = images(2)
    reports = check_rounds(tmp_path, [(before, data), (before, data), (after, data)], cut)
    assert [(each.computed, each.found) for each in reports] == [(12, 0), (0, 12), (12, 0)]


def test_code_that_has_changed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fl_elastic")
    check_rounds(tmp_path, [(net, images(2))] * 2)
    assert not caplog.text
    check_rounds(tmp_path, [(lambda: net(nn.SiLU), images(2))])
    assert "though its weights are the same: its code has changed" in caplog.text


def test_a_server_whose_prefix_differs_and_one_that_comes_back_to_it(tmp_path: Path) -> None:
    def thawed() -> nn.Module:
        model = net()
        with torch.no_grad():
            model[0].weight += 0.1  # type: ignore[union-attr, operator]
        return model

    def head_moved() -> nn.Module:
        model = net()
        with torch.no_grad():
            model[8].weight += 1.0  # type: ignore[union-attr, operator]
        return model

    makes = [net, head_moved, thawed, net]
    reports = check_rounds(tmp_path, [(make, images(2)) for make in makes])
    assert [each.found for each in reports] == [0, 12, 0, 0]


@pytest.mark.parametrize("sizes", [(8, 6), (6, 8)])
def test_images_of_several_sizes(tmp_path: Path, sizes: tuple[int, int]) -> None:
    data = [(x[..., :size, :size], y) for size in sizes for x, y in images(2, seed=size)]
    reports = check_rounds(tmp_path, [(net, data)] * 2)
    # Those of the first size are kept.
    assert [each.found for each in reports] == [0, 12] and not any(r.refused for r in reports)


def test_the_same_numbers_in_another_shape_are_another_example(tmp_path: Path) -> None:
    targets = torch.tensor([0, 1, 2, 0])
    data = [(torch.ones(4, 3, *shape), targets) for shape in ((4, 16), (16, 4), (8, 8))]
    reports = check_rounds(tmp_path, [(net, data)] * 2)
    # Those of the first shape are kept.
    assert [(each.computed, each.found) for each in reports] == [(12, 0), (8, 4)]


def test_data_that_grow_and_shrink_and_labels_that_change(tmp_path: Path) -> None:
    relabelled = [(x, (y + 1) % 3) for x, y in images(2)]
    rounds = [images(1), images(3), images(2), relabelled]
    reports = check_rounds(tmp_path, [(net, data) for data in rounds])
    assert [(each.computed, each.found) for each in reports] == [(6, 0), (12, 6), (0, 12), (0, 12)]
    # What is gone from the data is gone from the disk.
    check_rounds(tmp_path, [(net, images(1))])
    assert _stored(tmp_path / "kept") == 6


def _stored(folder: Path) -> int:
    """Return how many examples' features are in the file."""
    with closing(sqlite3.connect(folder / "features.db")) as file:
        return int(file.execute("SELECT count(*) FROM rows").fetchone()[0])


def test_a_bound_below_an_epoch(tmp_path: Path) -> None:
    keeps = 5 * room_of(1 + 8 * 64 * 4, page_for(1 + 8 * 64 * 4))
    few = [(x[i : i + 1], y[i : i + 1]) for x, y in images(2) for i in range(6)]
    reports = check_rounds(tmp_path, [(net, few)] * 3, keeps=keeps)
    assert [each.found for each in reports][1:] == [5, 5]
    assert (tmp_path / "kept" / "features.db").stat().st_size <= keeps + 8 * 2**14


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_features_that_fp16_does_not_hold_are_not_kept(tmp_path: Path, scale: float) -> None:
    def scaled() -> nn.Module:
        model = net()
        with torch.no_grad():
            for place, by in ((0, scale), (2, 1.0), (4, 1 / scale)):
                model[place].weight *= by  # type: ignore[union-attr, operator]
                model[place].bias *= 0  # type: ignore[union-attr, operator]
        return model

    reports = check_rounds(tmp_path, [(scaled, images(2))] * 2, precision="fp16")
    assert all("as fp16: keep them as fp32" in each.refused for each in reports)


def test_damage_anywhere_in_the_file(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "kept" / "features.db"
    found = []
    for _ in range(15):
        found += [each.found for each in check_rounds(tmp_path, [(net, images(2))], rounding=1e-5)]
        if not path.exists():
            # A damaged one, of which nothing could be wiped.
            continue
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 5, 500])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
    assert any(0 < each < 12 for each in found)


def test_two_clients_that_share_a_folder_by_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fl_elastic")
    mine, others = images(2), images(2, seed=5)
    check_rounds(tmp_path, [(net, mine), (net, others), (net, mine)])
    # At the same time.
    with closing(Rows(tmp_path / "kept" / "features.db", b"", most=2**20)):
        (report,) = check_rounds(tmp_path, [(net, mine)])
    assert "in use by another process" in report.refused
    assert "features are not kept" in caplog.text and "a folder of its own" in caplog.text


@pytest.mark.parametrize("blocked", ["file", "folder"])
def test_a_place_where_nothing_can_be_kept(tmp_path: Path, blocked: str) -> None:
    if blocked == "file":
        (tmp_path / "kept").write_text("in the way")
    else:
        (tmp_path / "kept" / "features.db").mkdir(parents=True)
    (report,) = check_rounds(tmp_path, [(net, images(2))])
    assert "cannot be made at" in report.refused


def test_a_full_disk_costs_the_features_and_not_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rounds(tmp_path, [(net, images(1))])

    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    # What is there needs no more room, and stays of use where there are more data.
    same, more = check_rounds(tmp_path, [(net, images(1)), (net, images(1) + images(2, seed=5))])
    assert [each.found for each in (same, more)] == [6, 6] and not more.refused
    assert (more.computed, _stored(tmp_path / "kept")) == (12, 6)
    (nothing,) = check_rounds(tmp_path, [(lambda: net(nn.SiLU), images(3))], "2")
    assert "No space left on device; free some space" in nothing.refused


@pytest.mark.slow
def test_a_client_killed_at_any_moment(tmp_path: Path) -> None:
    draw, found = random.Random(2), 0
    for _ in range(5):
        child = os.fork()
        if not child:
            while True:
                for size in (3, 1, 2):
                    trained(net(), images(size), tmp_path / "kept")
        time.sleep(draw.uniform(0.05, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found += sum(
            each.found for each in check_rounds(tmp_path, [(net, images(3))], rounding=1e-5)
        )
    assert found


def test_features_go_when_none_may_be_kept_any_more(tmp_path: Path) -> None:
    tests = images(2, seed=9)
    for keeps, left in ((1 << 20, 2), (0, 0)):
        one = client_of(net(), images(2), tmp_path, keeps=keeps, tests=tests)
        start, told = one.get_parameters({}), Train(cut=CUT).to_config()
        one.fit(start, told)
        one.evaluate(start, told)
        assert len([*tmp_path.glob("*features*")]) == left


@pytest.mark.parametrize(
    "tests",
    [
        images(2),
        [(x[i : i + size], y[i : i + size]) for x, y in images(1, seed=9) for i, size in ((0, 5), (5, 1))],
        [(torch.nn.functional.pad(x, (1, 1, 1, 1)), y) for x, y in images(2, seed=9)],
        [(x[..., :6, :6], y) for x, y in images(2, seed=9)],
    ],
    ids=["those of training", "other batches", "larger images", "smaller images"],
)  # fmt: skip
def test_tests_say_what_they_say_without_features(tmp_path: Path, tests: list[Batch]) -> None:
    told = Train(cut=CUT).to_config()
    said = []
    for keeps in (0, 1 << 20, 1 << 20):
        one = client_of(net(), images(2), tmp_path / str(keeps), keeps=keeps, tests=tests)
        start = one.get_parameters({})
        one.fit(start, told)
        said += [
            client_of(net(), images(2), tmp_path / str(keeps), keeps=keeps, tests=tests).evaluate(
                start, told
            )
        ]
    assert said[1] == said[2]
    assert said[0][0] == pytest.approx(said[1][0], rel=1e-6) and said[0][1:] == said[1][1:]


def test_clients_that_are_away_for_rounds(tmp_path: Path) -> None:
    """A federation ends with the same weights to the bit, whoever was asked when."""
    ended = {}
    for keeps in (1 << 20, 0):

        def app_of(node: int, keeps: int = keeps) -> Any:
            return elastic_client_app(
                lambda _: client_of(
                    net(), images(2, seed=node), tmp_path / f"{keeps}-{node}", keeps=keeps
                )
            )

        random.seed(1)
        terms = RoundConfig(cut=f"fixed:{CUT}")
        strategy = PartialUpdates(quiet(fraction_train=0.25, min_train_nodes=1), config=terms)
        result, _ = run(strategy, {n: app_of(n) for n in range(1, 5)}, arrays_of(net()), 12)
        ended[keeps] = as_weights(result.arrays)
    before = as_weights(arrays_of(net()))
    for name, value in ended[0].items():
        np.testing.assert_array_equal(ended[1 << 20][name], value)
        assert np.array_equal(value, before[name]) == (int(name[0]) < int(CUT))
