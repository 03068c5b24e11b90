"""One or two of ten clients lie in what ranks places: the head reads where it would have, or as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from slow_ones import slow_unless
from small_federation import arrays_of, as_weights, plain_sgd, run
from torch import Tensor, nn

from fl_elastic import Budget
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.flower.tasks.task import TASK
from fl_elastic.losses import classification_loss
from fl_elastic.readout import Place, Readout, loaded, places_of
from fl_elastic.readout.best_places import Sample
from fl_elastic.readout.place import parse_places
from fl_elastic.readout.places_wire import PlacesReply, decode_places, encode_places
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import put_head
from fl_elastic.training.sums_size import sums_bytes
from fl_elastic.update import Manifest

CLIENTS, CLASSES = 10, 4
Batches = list[tuple[Tensor, Tensor]]
Lie = Callable[[PlacesReply], PlacesReply]


def build() -> nn.Module:
    """A network that pools away where something is."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def data(node: int, count: int = 48, only: tuple[int, ...] = (0, 1, 2, 3)) -> Batches:
    """The class says in which quarter of the image there is a spot."""
    generator = torch.Generator().manual_seed(node)
    classes = torch.tensor(only)[torch.randint(0, len(only), (count,), generator=generator)]
    images = 0.5 * torch.randn(count, 1, 10, 10, generator=generator)
    spots = torch.randint(0, 5, (count, 2), generator=generator).tolist()
    for image, label, (row, column) in zip(images, classes.tolist(), spots, strict=True):
        image[0, 5 * (label // 2) + row, 5 * (label % 2) + column] += 3.0
    return list(zip(images.split(8), classes.split(8), strict=True))


TEST = data(1000, 800)


def alike(node: int) -> Batches:
    return data(node)


def two_classes(node: int) -> Batches:
    return data(node, only=(node % CLASSES, (node + 1) % CLASSES))


FLEETS = {"alike": alike, "two classes each": two_classes}


def with_rows(found: PlacesReply, change: Callable[[Any, int], Any]) -> PlacesReply:
    rows = {
        place: change(np.asarray(each), number)
        for number, (place, each) in enumerate(found.sample.rows.items())
    }
    return replace(found, sample=replace(found.sample, rows=rows))


def rolled(found: PlacesReply) -> PlacesReply:
    return replace(
        found, sample=replace(found.sample, targets=np.roll(found.sample.targets, 1, axis=1))
    )


def one_place_tells_all(found: PlacesReply) -> PlacesReply:
    """The classes themselves stand at the worst place, and noise everywhere else."""
    rng = np.random.default_rng(0)
    worst = next(reversed(found.sample.rows))

    def change(rows: Any, number: int) -> Any:
        noise = rng.normal(size=rows.shape)
        if number == len(found.sample.rows) - 1:
            noise = 0.01 * noise
            noise[:, :CLASSES] += found.sample.targets[:, : noise.shape[1]]
        return noise.astype(np.float32)

    assert worst.at_input
    return with_rows(found, change)


def other_names(found: PlacesReply) -> PlacesReply:
    """Each place of equal width under the next one's name."""
    rows = dict(found.sample.rows)
    for width in {each.shape[1] for each in rows.values()}:
        same = [place for place, each in rows.items() if each.shape[1] == width]
        given = [found.sample.rows[place] for place in (*same[1:], same[0])]
        rows |= dict(zip(same, given, strict=True))
    return replace(found, sample=replace(found.sample, rows=rows))


def unheard_of(found: PlacesReply) -> PlacesReply:
    rows = {replace(place, module=f"x{place.module}"): e for place, e in found.sample.rows.items()}
    kept = {replace(place, module=f"x{place.module}"): e for place, e in found.kept.items()}
    return replace(found, sample=replace(found.sample, rows=rows), kept=kept)


def copied(found: PlacesReply) -> PlacesReply:
    """One example again and again."""
    sample = found.sample
    rows = {place: np.repeat(each[:1], len(each), axis=0) for place, each in sample.rows.items()}
    noisy = {p: e + 1e-3 * np.random.default_rng(0).normal(size=e.shape) for p, e in rows.items()}
    targets = np.repeat(sample.targets[:1], len(sample.targets), axis=0)
    return replace(found, sample=replace(sample, rows=noisy, targets=targets))


def one_fold(found: PlacesReply) -> PlacesReply:
    return replace(
        found, sample=replace(found.sample, folds=np.zeros(len(found.sample.folds), np.int64))
    )


def many(found: PlacesReply) -> PlacesReply:
    sample = Sample.together([found.sample] * 20)
    return replace(found, sample=replace(sample, clients=np.zeros(len(sample.folds), np.int64)))


LIES: dict[str, Lie] = {
    "features ten thousand times as large": lambda f: with_rows(f, lambda rows, _: 1e4 * rows),
    "features five times as large": lambda f: with_rows(f, lambda rows, _: 5 * rows),
    "features of one place a hundred times as large": lambda f: with_rows(
        f, lambda rows, number: rows * (100 if number == 3 else 1)
    ),
    "features a hundredth as large": lambda f: with_rows(f, lambda rows, _: 0.01 * rows),
    "labels swapped": rolled,
    "labels swapped, large": lambda f: rolled(with_rows(f, lambda rows, _: 3 * rows)),
    "one place tells all": one_place_tells_all,
    "other places' names": other_names,
    "unheard-of names": unheard_of,
    "other widths": lambda f: with_rows(f, lambda rows, _: np.hstack([rows, rows])),
    "copied rows": copied,
    "one fold": one_fold,
    "twenty times the examples": lambda f: many(rolled(f)),
    "noise": lambda f: with_rows(
        f, lambda rows, n: np.random.default_rng(n).normal(size=rows.shape).astype(np.float32)
    ),
    "another last layer": lambda f: replace(f, last="0"),
    "other tensors": lambda f: replace(f, kept={place: (0,) for place in f.kept}),
    "no time at all": lambda f: replace(f, seconds=dict.fromkeys(f.seconds, 0.0)),
}  # fmt: skip


def chosen_by(fleet: str, liars: int, lie: Lie | None, **budgets: Any) -> str:
    """Where the head reads after round zero; the liars come first."""
    manifest = Manifest.of(build())

    class Client(ElasticClient):
        node = 0

        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            packed, count, metrics = super().fit(parameters, config)
            if config.get(TASK) == "rank-places" and self.node <= liars and lie is not None:
                told = lie(decode_places(packed[0].tobytes(), manifest))
                packed = [np.frombuffer(encode_places(told, manifest), np.uint8)]
            return packed, count, metrics

    def client(node: int) -> ElasticClient:
        made = Client(
            build(), FLEETS[fleet](node), TEST, loss_fn=classification_loss, optimizer_fn=plain_sgd,
            budget=budgets.get(f"node{node}", Budget()),
        )  # fmt: skip
        made.node = node
        return made

    apps = {
        node: elastic_client_app(lambda _, node=node: client(node))
        for node in range(1, CLIENTS + 1)
    }
    terms = RoundConfig(read="auto", plan="none")
    models: list[Any] = []
    inner = FedAvg(min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    run(
        PartialUpdates(inner, config=terms), apps, arrays_of(build()), 0,
        evaluate_fn=lambda _, arrays: models.append(arrays),
    )  # fmt: skip
    return places_of(as_weights(models[-1]))


def accuracy_from(places: str, fleet: str) -> float:
    """In percent, of a head in closed form that everybody's honest sums give at these places."""
    model: nn.Module = build()
    if places:
        model = Readout(model, places, TEST[0][0], CLASSES)
    sums = [head_sums(model, FLEETS[fleet](node), together=8) for node in range(1, CLIENTS + 1)]
    put_head(model, closed_form_head(*sums), "head.weight" if places else "6.weight")
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in TEST)
    return 100 * right / 800


@cache
def chosen_without(fleet: str, liars: int = 0) -> str:
    """The places that are chosen without those who lie."""
    return chosen_by(fleet, liars, unheard_of)


@cache
def clean(fleet: str, liars: int = 0) -> float:
    """Of the places that are chosen without those who lie."""
    return accuracy_from(chosen_without(fleet, liars), fleet)


@pytest.mark.parametrize("fleet", slow_unless("alike".__eq__, FLEETS))
def test_the_clean_choice_is_far_better_than_the_last_layer(fleet: str) -> None:
    assert clean(fleet) > accuracy_from("", fleet) + 20


def first(lie: str, liars: int, fleet: str) -> bool:
    """Whether it is tested each time."""
    return liars == 2 and fleet == "alike" and lie in ("labels swapped, large", "one fold")


@pytest.mark.parametrize(
    ("lie", "liars", "fleet"), slow_unless(first, list(product(LIES, (1, 2), FLEETS)))
)
def test_a_fifth_of_liars_costs_less_than_two_points(lie: str, liars: int, fleet: str) -> None:
    places = chosen_by(fleet, liars, LIES[lie])
    assert accuracy_from(places, fleet) > clean(fleet, liars) - 2, places


def test_who_is_left_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fl_elastic"):
        chosen_by("alike", 1, LIES["features ten thousand times as large"])
    assert any("times as large as usual" in record.message for record in caplog.records)


POOR = {
    "uplink": Budget(uplink=sums_bytes(17, CLASSES, 48)),
    "memory": Budget(memory=40 * 48 * 17),
}


@pytest.mark.parametrize("short_of", slow_unless("uplink".__eq__, POOR))
def test_where_some_can_afford_less_the_head_reads_where_all_can(short_of: str) -> None:
    """Sums of at most 17 features."""
    places = chosen_by("alike", 0, None, **{f"node{node}": POOR[short_of] for node in (2, 5, 9)})
    if places:
        assert Readout(build(), places, TEST[0][0], CLASSES).head.in_features <= 17
    assert Readout(build(), chosen_without("alike"), TEST[0][0], CLASSES).head.in_features > 17


@pytest.mark.slow
def test_who_has_no_time_for_the_model_has_all_read_its_input() -> None:
    places = parse_places(chosen_by("alike", 0, None, node3=Budget(deadline=1e-9)))
    assert {place.module for place in places} == {"input"}


def test_who_can_afford_no_place_is_left_out_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="fl_elastic"):
        places = chosen_by("alike", 0, None, node3=Budget(memory=1))
    assert places and any("at most 1 features" in record.message for record in caplog.records)


def test_a_state_is_loaded_from_what_a_run_returns() -> None:
    state = arrays_of(Readout(build(), "1@grid2", TEST[0][0], CLASSES))
    assert places_of(as_weights(state)) == "1@grid2"
    found = loaded(build(), state, TEST[0][0])
    assert isinstance(found, Readout) and found.places == (Place("1", "grid", 2),)
