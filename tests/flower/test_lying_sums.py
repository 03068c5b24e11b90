"""One or two of ten clients lie about their sums: the head is that of the others, and nobody honest is left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from in_process_grid import InProcessGrid
from slow_ones import slow_unless
from small_federation import arrays_of, as_weights, plain_sgd, quiet, run
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import encode_head_sums
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.flower.records import train_reply
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.round_zero import with_closed_form_head
from fl_elastic.flower.tasks.task import TASK
from fl_elastic.losses import classification_loss
from fl_elastic.training.head_pass import head_sums
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.checks import Limits

CLIENTS, CLASSES, INPUTS, FEATURES = 10, 10, 24, 80
Rows = tuple[torch.Tensor, torch.Tensor]
Lie = Callable[[nn.Module, Rows], HeadSums]


def build() -> nn.Module:
    """Random features and a head."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))


def examples(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(99)) * 0.8
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    return places[classes] + torch.randn(count, INPUTS, generator=generator), classes


TEST = examples(1000, 1)


def alike() -> list[Rows]:
    return [examples(50, 10 + client) for client in range(CLIENTS)]


def two_classes() -> list[Rows]:
    """Each class is held by two of them."""
    x, y = examples(600, 5)
    halves = [torch.nonzero(y == label).flatten().chunk(2) for label in range(CLASSES)]
    rows = [torch.cat([halves[c][0], halves[(c + 1) % CLASSES][1]]) for c in range(CLIENTS)]
    return [(x[each], y[each]) for each in rows]


def one_class() -> list[Rows]:
    x, y = examples(600, 6)
    return [(x[y == label], y[y == label]) for label in range(CLASSES)]


def unequal_sizes() -> list[Rows]:
    return [examples(12 * (1 + client), 30 + client) for client in range(CLIENTS)]


def one_has_a_class_alone() -> list[Rows]:
    x, y = examples(600, 7)
    rows = torch.nonzero(y != 0).flatten()
    return [*((x[each], y[each]) for each in rows.chunk(CLIENTS - 1)), (x[y == 0], y[y == 0])]


def sums(model: nn.Module, rows: Rows) -> HeadSums:
    return head_sums(model, [rows], together=8)


def rolled(rows: Rows) -> Rows:
    return rows[0], (rows[1] + 1) % CLASSES


def larger(found: HeadSums, factor: float) -> HeadSums:
    by = np.append(np.full(len(found.means), factor), 1.0)
    folds = tuple(Fold(each.rows * by, each.targets, each.squares) for each in found.folds)
    products, targets = found.rest_products * np.outer(by, by), found.rest_targets * by[:, None]
    return HeadSums(found.weight, products, targets, found.rest_squares, True, folds)


def uncorrelated(model: nn.Module, rows: Rows) -> HeadSums:
    """Each feature tells the class, and none has to do with another."""
    honest = sums(model, rows)
    n, d = float(honest.num_examples), len(honest.products) - 1
    own = np.diag(honest.products)[:-1] / n
    products = np.zeros((d + 1, d + 1))
    products[:-1, :-1], products[-1, -1] = np.diag(own * n), n
    targets = np.zeros_like(honest.targets)
    targets[-1] = honest.targets[-1]
    spread = np.maximum(honest.squares - targets[-1] ** 2 / n, 0.0)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (d, CLASSES))
    targets[:-1] = 0.9 * signs * np.sqrt(np.outer(own * n, spread))
    return HeadSums(honest.weight, products, targets, honest.squares, True)


LIES: dict[str, Lie] = {
    "uncorrelated": uncorrelated,
    "uncorrelated, ten times the examples": lambda model, rows: uncorrelated(model, rows).times(10),
    "rolled": lambda model, rows: sums(model, rolled(rows)),
    "rolled, ten times": lambda model, rows: sums(model, rolled(rows)).times(10),
    "rolled, larger": lambda model, rows: larger(sums(model, rolled(rows)), 10**0.5),
    "rolled, larger, ten times": lambda model, rows: larger(
        sums(model, rolled(rows)), 10**0.5
    ).times(10),
    "rolled, without folds": lambda model, rows: sums(model, rolled(rows)).without_folds(),
    "rolled, smaller": lambda model, rows: larger(sums(model, rolled(rows)), 0.4),
    "by chance": lambda model, rows: sums(model, (rows[0], rows[1][torch.randperm(len(rows[1]))])),
    "one class": lambda model, rows: sums(model, (rows[0], torch.zeros_like(rows[1]))).times(10),
}  # fmt: skip


def fleet(
    parts: list[Rows], lies: Mapping[int, Lie], *, later: bool = False, rounds: int = 0
) -> list[float]:
    """Accuracy in percent before the first round and after each; ``lies`` is by node, from 1 on."""
    manifest, asked = Manifest.of(build()), dict.fromkeys(lies, 0)

    class Client(ElasticClient):
        node = 0

        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            packed, count, metrics = super().fit(parameters, config)
            if config.get(TASK) == "solve-head" and self.node in lies:
                asked[self.node] += 1
                if not later or asked[self.node] > 1:
                    told = lies[self.node](self.model, parts[self.node - 1])
                    packed = [np.frombuffer(encode_head_sums(told, manifest), np.uint8)]
                    count = told.num_examples
            return packed, count, metrics

    def client(node: int) -> ElasticClient:
        one = Client(
            build(), list(zip(*(each.split(25) for each in parts[node - 1]), strict=True)), [TEST],
            budget=Budget(), loss_fn=classification_loss, optimizer_fn=plain_sgd, policy="full",
        )  # fmt: skip
        one.node = node
        return one

    seen: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = build()
        weights = {n: torch.from_numpy(np.array(each)) for n, each in as_weights(arrays).items()}
        model.load_state_dict(weights)
        with torch.no_grad():
            seen.append(100 * float((model(TEST[0]).argmax(dim=1) == TEST[1]).float().mean()))
        return MetricRecord({"accuracy": seen[-1]})

    strategy = PartialUpdates(quiet(), config=RoundConfig(read="last", solve_every=1))
    apps = {n: elastic_client_app(lambda _, n=n: client(n)) for n in range(1, len(parts) + 1)}
    run(strategy, apps, arrays_of(build()), rounds, evaluate_fn=evaluate)
    return seen


@pytest.mark.parametrize(
    ("lie", "liars"),
    slow_unless(lambda *case: case == ("uncorrelated, ten times the examples", 2), product(LIES, (1, 2))),
)  # fmt: skip
def test_one_or_two_liars_of_ten_cost_less_than_two_points(lie: str, liars: int) -> None:
    (clean,) = fleet(alike()[liars:], {})
    (found,) = fleet(alike(), dict.fromkeys(range(1, liars + 1), LIES[lie]))
    assert clean > 85 and found > clean - 2


@pytest.mark.parametrize(
    "lie", slow_unless("one class".__eq__, ["uncorrelated", "rolled, larger, ten times", "one class"])
)  # fmt: skip
def test_liars_in_later_sums_cost_less_than_two_points(lie: str) -> None:
    clean = fleet(alike()[2:], {}, rounds=3)
    found = fleet(alike(), dict.fromkeys((1, 2), LIES[lie]), later=True, rounds=3)
    assert all(one > other - 2 for one, other in zip(found, clean, strict=True))


def test_who_lies_once_sets_no_standard_for_the_rounds_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fl_elastic")
    asked: list[int] = []

    def once(model: nn.Module, rows: Rows) -> HeadSums:
        asked.append(1)
        return (sums if len(asked) > 1 else LIES["uncorrelated"])(model, rows)

    found = fleet(alike(), {1: once}, rounds=3)
    assert min(found) > fleet(alike()[1:], {})[0] - 2
    assert len(asked) == 4 and "spoils" not in caplog.text


@pytest.mark.parametrize(
    "parts", [alike, two_classes, one_class, unequal_sizes, one_has_a_class_alone]
)
def test_honest_clients_are_not_left_out_however_unlike_they_are(
    parts: Callable[[], list[Rows]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fl_elastic")
    found = fleet(parts(), {})
    assert found[0] > 85
    assert "left out" not in caplog.text
    assert re.findall(r"examples of (\d+) clients", caplog.text) == ["10"]


def test_a_liar_about_classes_of_which_others_know_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (clean,) = fleet(two_classes(), {})
    caplog.clear()
    (found,) = fleet(two_classes(), {4: LIES["rolled"]})
    assert found > clean - 2 and "node 4 is left out: its sums make" in caplog.text


def direct(
    parts: list[Rows], lies: Mapping[int, Lie], features: int
) -> tuple[float, list[tuple[int, str]]]:
    """Accuracy in percent on the classes that the parts have, and who was left out: round zero without a run."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, features), nn.ReLU(), nn.Linear(features, CLASSES))
    manifest, record = Manifest.of(model), RoundRecord(0, trains=False)
    # Messages want to know the run.
    InProcessGrid(1, lambda node: ClientApp())
    replies = []
    for node, rows in enumerate(parts):
        told = lies.get(node, sums)(model, rows)
        packed = np.frombuffer(encode_head_sums(told, manifest), np.uint8)
        question = Message(RecordDict(), node + 1, "train")
        replies.append(Message(train_reply([packed], told.num_examples, {}), reply_to=question))
    solved = with_closed_form_head(
        replies, weights_of(model, manifest), manifest, Limits(), record, lambda *_: None
    )
    load_weights(model, manifest, solved.weights)
    x, y = TEST
    known = torch.isin(
        y, torch.cat([rows[1] for node, rows in enumerate(parts) if node not in lies])
    )
    with torch.no_grad():
        right = model(x[known]).argmax(dim=1) == y[known]
    return 100 * float(right.float().mean()), [(e.node_id - 1, e.reason) for e in record.rejected]


def fleet_of(kind: str, clients: int, each: int) -> list[Rows]:
    """So many clients, alike, of one class each, or with a share of each class that is drawn."""
    if kind == "alike":
        return [examples(each, 10 + client) for client in range(clients)]
    x, y = examples(each * clients, 6)
    if kind == "one class each":
        own = [torch.nonzero(y == label).flatten() for label in range(min(clients, CLASSES))]
        # Where a class is held by several, these do not stand side by side.
        parts = zip(*(all_of.chunk(max(clients // CLASSES, 1)) for all_of in own), strict=True)
        return [(x[rows], y[rows]) for part in parts for rows in part]
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(clients, 0.3), size=CLASSES)
    owner = np.array([rng.choice(clients, p=shares[label]) for label in y.tolist()])
    return [(x[owner == k], y[owner == k]) for k in range(clients) if (owner == k).sum() > 8]


FLEETS = [(5, 100), (10, 50), (30, 50)]
KINDS = ["alike", "one class each", "unequal"]
# Few features, about as many as there are examples of all (500 at most), and twice as many.
WIDTHS = [80, 500, 1000]
ANY_FLEET = list(product(WIDTHS, KINDS, FLEETS))


# Two of ten unequal clients that lie so with features ten times as strong lose more than five points: not held.
NOT_HELD = (500, "unequal", (10, 50), "rolled, larger, ten times")
LYING = [
    (width, kind, fleet, lie)
    for width, kind, fleet in ANY_FLEET
    for lie in LIES
    if (
        width == 80
        or (width == 500 and fleet != (30, 50))
        or (fleet == (10, 50) and lie == "rolled")
    )
    and (width, kind, fleet, lie) != NOT_HELD
]


def first(width: int, kind: str, fleet: tuple[int, int], lie: str = "") -> bool:
    """Whether it is tested each time: every lie to unequal clients, and one in every kind of fleet."""
    return fleet == (10, 50) and (
        (width == 80 and (kind == "unequal" or lie in ("", "rolled")))
        or (width == 500 and kind == "alike" and lie in ("", "rolled"))
    )


@pytest.mark.parametrize(("width", "kind", "fleet"), slow_unless(first, ANY_FLEET))
def test_nobody_honest_is_left_out_of_any_fleet(
    width: int, kind: str, fleet: tuple[int, int]
) -> None:
    _, gone = direct(fleet_of(kind, *fleet), {}, width)
    assert not gone


@pytest.mark.parametrize(
    ("width", "kind", "fleet", "lie"),
    slow_unless(first, LYING),
)
def test_a_fifth_of_liars_costs_less_than_two_points_in_any_fleet(
    width: int, kind: str, fleet: tuple[int, int], lie: str
) -> None:
    """Clean is the fleet without those who lie. Where each has one class it may cost three points, in a fleet of 30
    for a tenth who lie: honest sums are unlike each other there, and a fifth of liars shifts what is usual.
    """
    parts, most = fleet_of(kind, *fleet), 3 if kind == "one class each" else 2
    fifth = len(parts) // (10 if most == 3 and len(parts) > CLASSES else 5)
    for liars in sorted({max(len(parts) // 10, 1), fifth}):
        clean, _ = direct(parts[liars:], {}, width)
        torch.manual_seed(0)
        found, gone = direct(parts, {client: LIES[lie] for client in range(liars)}, width)
        assert found > clean - most, (liars, found, clean, gone)
