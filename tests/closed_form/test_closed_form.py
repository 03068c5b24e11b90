"""The head in closed form: the ridge regression of all examples together, whoever holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from damage import assert_damage_is_noticed, set_to
from numpy.typing import NDArray
from scipy.linalg import lstsq  # type: ignore[import-untyped]
from slow_ones import slow_unless
from torch import nn

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums, encode_head_sums
from fl_elastic.errors import TrainingError, UpdateError
from fl_elastic.training.head_pass import head_sums
from fl_elastic.update import Manifest
from fl_elastic.update.checks import Limits
from fl_elastic.update.frame import MessageKind, pack

Floats = NDArray[np.float64]


def examples(seed: int, count: int, features: int = 6, classes: int = 4) -> tuple[Floats, Floats]:
    """Features of unlike size and place, and classes that follow from them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)) * 10.0 ** rng.uniform(-1, 1, features) + rng.normal(
        size=features
    )
    scores = x @ rng.normal(size=(features, classes)) + rng.normal(size=(count, classes))
    return x, np.eye(classes)[scores.argmax(axis=1)]


def sums_of(x: Floats, y: Floats, *, classes: bool = True, folds: Any = None) -> HeadSums:
    """Sums with every fifth example in the same fold, or in those that are given."""
    parts = np.arange(len(x)) % 5 if folds is None else np.asarray(folds)
    held = [
        Fold.of(x[parts == part], y[parts == part]) for part in range(5) if (parts == part).any()
    ]
    return HeadSums.of_folds("head.weight", held, x.shape[1], y.shape[1], classes)


def slow_ridge(x: Floats, y: Floats, penalty: float) -> tuple[Floats, Floats]:
    """Least squares on standardised features with a row per penalised weight, bias left free."""
    mean, spread = x.mean(axis=0), x.std(axis=0)
    rows = (x - mean) / spread
    extra = np.sqrt(penalty * len(x)) * np.eye(x.shape[1])
    goal = y - y.mean(axis=0)
    weight = lstsq(np.vstack([rows, extra]), np.vstack([goal, np.zeros((x.shape[1], y.shape[1]))]))[
        0
    ]
    weight = weight / spread[:, None]
    return weight, y.mean(axis=0) - mean @ weight


def held_out_error(x: Floats, y: Floats, folds: Floats, penalty: float) -> float:
    """Each fold predicted by the normal equations of the other examples, one after the other."""
    mean, spread = x.mean(axis=0), x.std(axis=0)
    rows, left = np.hstack([(x - mean) / spread, np.ones((len(x), 1))]), 0.0
    for fold in np.unique(folds):
        others = folds != fold
        ridge = np.diag([penalty * len(x)] * x.shape[1] + [0.0])
        known = rows[others]
        weight = np.linalg.solve(known.T @ known + ridge, known.T @ y[others])
        left += float(((y[~others] - rows[~others] @ weight) ** 2).sum())
    return left / float(((y - y.mean(axis=0)) ** 2).sum())


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_ridge_regression_of_all_examples(seed: int) -> None:
    x, y = examples(seed, 60)
    numbers = y @ np.random.default_rng(seed).normal(size=(4, 2))
    head = closed_form_head(sums_of(x, numbers, classes=False))
    weight, bias = slow_ridge(x, numbers, head.penalty)
    np.testing.assert_allclose(head.weight, weight.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias, bias, rtol=1e-4, atol=1e-4)


PENALTIES = 10.0 ** np.arange(-4, 2.01, 0.5)


@pytest.mark.parametrize(("count", "features"), [(30, 3), (30, 10), (30, 27), (30, 33), (11, 110)])
@pytest.mark.parametrize("seed", range(3))
def test_the_penalty_is_the_one_of_least_error_on_held_out_examples(
    seed: int, count: int, features: int
) -> None:
    x, y = examples(seed, count, features=features)
    x[[3, 4]], y[[3, 4]] = x[[8, 9]], y[[8, 9]]  # equal examples, in the same folds
    folds = np.arange(count) % 5
    head = closed_form_head(sums_of(x, y))
    tried = [held_out_error(x, y, folds, penalty) for penalty in PENALTIES]
    assert head.penalty == pytest.approx(PENALTIES[int(np.argmin(tried))])
    assert head.error == pytest.approx(min(*tried, 1.0), rel=1e-6)


@pytest.mark.parametrize("features", [8, 100])
def test_of_many_clients_the_fifth_at_either_end_does_not_say_which_penalty(features: int) -> None:
    clients = 6
    parts = [examples(seed, 15 + seed, features=features) for seed in range(clients)]
    # One claims that its examples have other classes.
    parts[2] = parts[2][0], np.roll(parts[2][1], 1, axis=1)
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    owner = np.repeat(np.arange(clients), [len(each) for each, _ in parts])
    # Folds of a client are left out with the next ones of the next client.
    folds = np.concatenate([(np.arange(len(each)) + k) % 5 for k, (each, _) in enumerate(parts)])
    mean, spread = x.mean(axis=0), x.std(axis=0)
    rows = np.hstack([(x - mean) / spread, np.ones((len(x), 1))])
    tried = []
    for penalty in PENALTIES:
        left = np.zeros(len(x))
        for fold in range(5):
            others = folds != fold
            ridge = np.diag([penalty * len(x)] * features + [0.0])
            weight = np.linalg.solve(
                rows[others].T @ rows[others] + ridge, rows[others].T @ y[others]
            )
            left[~others] = ((y[~others] - rows[~others] @ weight) ** 2).sum(axis=1)
        means = np.array([left[owner == k].mean() for k in range(clients)])
        inner = means.argsort()[2:-2]
        tried.append(np.average(means[inner], weights=np.bincount(owner)[inner]))
    head = closed_form_head(*(sums_of(*each) for each in parts))
    assert head.penalty == pytest.approx(PENALTIES[int(np.argmin(tried))])
    variance = float(((y - y.mean(axis=0)) ** 2).sum() / len(y))
    assert head.error == pytest.approx(min(min(tried) / variance, 1.0), rel=1e-6)


def test_those_who_hold_one_class_do_not_say_which_penalty() -> None:
    rng = np.random.default_rng(0)
    found = []
    for client in range(8):
        rare = (np.arange(60) % 2 == 0) & (client == 3)
        x = rng.normal(size=(60, 16)) + 1.5 * rare[:, None]
        found.append(sums_of(x, np.eye(2)[rare.astype(int)]))
    head = closed_form_head(*found)
    rare = np.arange(1000) % 16 == 0
    x = rng.normal(size=(1000, 16)) + 1.5 * rare[:, None]
    says = (x @ head.weight.T + head.bias).argmax(axis=1) == 1
    # To the seven others, a head that always names their class errs least.
    assert says[rare].mean() > 0.8 and says[~rare].mean() < 0.01
    assert head.error < 0.5


def test_chance_that_explains_little_does_not_hide_a_stronger_penalty() -> None:
    rng = np.random.default_rng(23)
    parts = [(rng.normal(size=(8, 30)), np.eye(2)[rng.integers(2, size=8)]) for _ in range(3)]
    # At first errors grow with the penalty, from 1.16 of the mean's, and only then fall to 0.91.
    head = closed_form_head(*(sums_of(*each) for each in parts))
    assert head.penalty == PENALTIES[-1]
    assert head.error == pytest.approx(0.906, abs=0.001)


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_equal_examples_do_not_tell_what_is_to_be_expected_of_others(copies: int) -> None:
    """Where features are more than examples, every example predicts its own copy."""
    torch.manual_seed(copies)
    x, y = torch.randn(60, 400), torch.randint(0, 2, (60,))
    order = torch.randperm(60 * copies) % 60
    found = head_sums(
        nn.Linear(400, 2), list(zip(x[order].split(7), y[order].split(7), strict=True))
    )
    head = closed_form_head(found)
    # Classes that are drawn by chance cannot be told.
    assert head.error > 0.9 and head.penalty >= 1.0


@pytest.mark.parametrize("count", [4, 30, 1000])
def test_the_same_examples_are_held_out_in_any_order(count: int) -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(count, 5), torch.randint(0, 3, (count,)), nn.Linear(5, 3)
    order = torch.randperm(count)
    one = head_sums(model, list(zip(x.split(8), y.split(8), strict=True)))
    other = head_sums(model, list(zip(x[order].split(3), y[order].split(3), strict=True)))
    assert len(one.folds) == min(count, 5) == len(other.folds)
    for fold, same in zip(one.folds, other.folds, strict=True):
        np.testing.assert_allclose(fold.rows.T @ fold.rows, same.rows.T @ same.rows, rtol=1e-9)
    held = [fold.num_examples for fold in one.folds]
    assert max(held) - min(held) <= 1 and sum(held) == pytest.approx(min(count, 320))
    # What is in no fold is in the sums all the same.
    assert one.num_examples == count
    assert one.beside_folds().num_examples == max(count - 320, 0)


def test_examples_are_told_apart_by_features_where_inputs_have_no_row_for_each() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(x.mean(dim=0))

    x = torch.randn(7, 20, 3)
    found = head_sums(TimeFirst(), [(x, torch.arange(20) % 2)])
    assert [round(fold.num_examples) for fold in found.folds] == [4] * 5


def test_stretched_scores_name_the_same_classes_and_are_as_sure_as_they_are_right() -> None:
    x, y = examples(5, 400)
    head = closed_form_head(sums_of(x, y))
    weight, bias = slow_ridge(x, y, head.penalty)
    scores = x @ head.weight.T.astype(float) + head.bias
    assert (scores.argmax(axis=1) == (x @ weight + bias).argmax(axis=1)).mean() > 0.995
    own = nn.functional.cross_entropy(torch.tensor(scores), torch.tensor(y.argmax(axis=1)))
    flat = nn.functional.cross_entropy(
        torch.tensor(x @ weight + bias), torch.tensor(y.argmax(axis=1))
    )
    assert float(own) < float(flat)


def test_features_that_stand_still_get_no_weight() -> None:
    x, y = examples(1, 50)
    x[:, 2] = 3.0
    head = closed_form_head(sums_of(x, y))
    assert not head.weight[:, 2].any() and np.isfinite(head.weight).all()


@pytest.mark.parametrize("travels", [False, True])
def test_a_column_of_a_table_counts_whatever_its_unit(travels: bool) -> None:
    """Amounts in the millions beside shares of a millionth."""
    x, y = examples(3, 120, features=40)
    units = 10.0 ** np.linspace(-8, 8, 40)
    one, other = sums_of(x, y), sums_of(x * units, y)
    if travels:
        one, other = (
            decode_head_sums(encode_head_sums(each, linear_manifest()), linear_manifest())
            for each in (one, other)
        )
    expected, found = closed_form_head(one), closed_form_head(other)
    assert found.penalty == expected.penalty
    close = {"rtol": 1e-3, "atol": 1e-4} if travels else {"rtol": 1e-7, "atol": 1e-9}
    np.testing.assert_allclose(found.weight * units, expected.weight, **close)


def test_without_a_bias_nothing_is_centred() -> None:
    x, _ = examples(4, 80)
    numbers = x @ np.random.default_rng(0).normal(size=(6, 2))
    head = closed_form_head(sums_of(x, numbers, classes=False), intercept=False)
    np.testing.assert_allclose(x @ head.weight.T, numbers, rtol=1e-2, atol=0.1)
    assert not head.bias.any()


class Net(nn.Module):
    """Features, dropout and batch statistics below a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def data(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, 4, 3)
    return [
        (torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def test_sums_are_those_of_the_features_in_eval_mode_and_leave_no_trace() -> None:
    torch.manual_seed(0)
    model = Net()
    model.body[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = head_sums(model, data())
    assert [m.training for m in (model, model.body, model.body[1], model.head)] == [
        True,
        True,
        False,
        True,
    ]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    model.eval()
    with torch.no_grad():
        x = torch.cat([model.body(inputs) for inputs, _ in data()]).double().numpy()
    y = np.eye(3)[torch.cat([targets for _, targets in data()]).numpy()]
    slow = sums_of(x, y)
    assert found.weight == "head.weight" and found.num_examples == 11
    for one, other in ((found.products, slow.products), (found.targets, slow.targets)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_constant_features_of_many_examples_are_not_rounded_into_impossible_sums() -> None:
    """Sums of thousands of equal squares are off by more than the rounding of one of them."""
    rng = np.random.default_rng(0)
    constant = rng.uniform(0.01, 2000, 20).astype(np.float32)
    x = np.hstack([rng.normal(size=(5000, 4)).astype(np.float32), np.tile(constant, (5000, 1))])
    y = rng.integers(0, 3, 5000)
    model = nn.Linear(24, 3)
    given, labels = torch.from_numpy(x).split(64), torch.from_numpy(y).split(64)
    sums = head_sums(model, list(zip(given, labels, strict=True)))
    rows = np.hstack([x.astype(np.float64), np.ones((5000, 1))])
    exact = rows.T @ np.eye(3)[y]
    np.testing.assert_allclose(sums.targets, exact, rtol=1e-12, atol=1e-9)
    examples, mean = 5000.0, sums.products[-1, :-1] / 5000.0
    variance = np.diag(sums.products)[4:-1] / examples - mean[4:] ** 2
    assert (np.abs(variance) <= 1e-14 * constant.astype(np.float64) ** 2).all()
    manifest = Manifest.of(model)
    back = decode_head_sums(encode_head_sums(sums, manifest), manifest)
    assert back.num_examples == 5000 and not closed_form_head(back).weight[:, 4:].any()


def test_an_error_on_the_way_leaves_no_trace() -> None:
    model = Net()
    with pytest.raises(TrainingError, match="cannot take a batch"):
        head_sums(model, [(torch.randn(2, 9), torch.zeros(2, dtype=torch.long))])
    assert model.training and not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("model", "targets", "words"),
    [
        (
            nn.Sequential(nn.Linear(5, 3), nn.ReLU()),
            torch.tensor([0, 1]),
            "is that of a linear layer",
        ),
        (nn.Linear(5, 3), torch.tensor([0, 3]), "below 3"),
        (nn.Linear(5, 3), torch.tensor([0, -1]), "below 3"),
        (nn.Linear(5, 3), torch.zeros(2, 2), "targets are"),
        (nn.Linear(5, 3), "abc", "targets are str"),
        (nn.Linear(5, 3), torch.zeros(2), r"targets are float32 of shape \(2,\)"),
    ],
)
def test_what_has_no_such_head_is_said(model: nn.Module, targets: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        head_sums(model, [(torch.randn(2, 5), targets)])


torch.manual_seed(0)
MODEL = Net()
MANIFEST = Manifest.of(MODEL)


def test_features_far_from_zero_lose_nothing_on_the_wire() -> None:
    model = nn.Linear(2, 1)
    manifest = Manifest.of(model)
    x = np.random.default_rng(0).normal(size=(200, 2)) + 1e5
    y = (x[:, :1] - 1e5) * 3
    for folds in (1, 5):
        held = [Fold.of(x[part::5], y[part::5]) for part in range(folds)]
        rest = np.hstack([x, np.ones((200, 1))])[np.arange(200) % 5 >= folds]
        goals = y[np.arange(200) % 5 >= folds]
        sums = HeadSums("weight", rest.T @ rest, rest.T @ goals, (goals**2).sum(axis=0), False)
        sums = sums + HeadSums.of_folds("weight", held, 2, 1, False)
        head = closed_form_head(decode_head_sums(encode_head_sums(sums, manifest), manifest))
        np.testing.assert_allclose(head.weight, [[3, 0]], atol=0.01)


def some_examples(seed: int, count: int, features: int = 40) -> tuple[Floats, Floats]:
    """Examples some of whose features stand still, some are copies, and of which some are equal."""
    x, y = examples(seed, count, features=features)
    x = np.maximum(x, 0.0)
    x[:, seed % features], x[:, 3] = 0.3, x[:, 4]
    x[count // 2 :][:2] = x[0]
    return x, y


def linear_manifest(features: int = 40) -> Manifest:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(features, 4))
    return Manifest.of(model)


@pytest.mark.parametrize("held", [0, 1, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 7, 20, 60, 400])
@pytest.mark.parametrize("seed", slow_unless(lambda seed: not seed, range(3)))
def test_sums_and_their_folds_come_back_from_the_wire(seed: int, count: int, held: int) -> None:
    x, y = some_examples(seed, count)
    folds, rows = np.arange(count) % 5, np.hstack([x, np.ones((count, 1))])
    rest = folds >= held
    sums = HeadSums(
        "head.weight", rows[rest].T @ rows[rest], rows[rest].T @ y[rest], (y[rest] ** 2).sum(axis=0), True
    )  # fmt: skip
    parts = [Fold.of(x[folds == part], y[folds == part]) for part in range(held) if part < count]
    sums = sums + HeadSums.of_folds("head.weight", parts, 40, 4, True)
    packed = encode_head_sums(sums, linear_manifest())
    back = decode_head_sums(packed, linear_manifest())
    size = np.sqrt(np.outer(np.diag(sums.products), np.diag(sums.products)))
    assert (np.abs(back.products - sums.products) <= 1e-6 * size + 1e-9).all()
    np.testing.assert_allclose(back.targets, sums.targets, rtol=1e-5, atol=1e-5)
    for one, other in zip(sums.folds, back.folds, strict=True):
        np.testing.assert_allclose(
            other.rows.T @ other.rows, one.rows.T @ one.rows, atol=2e-6 * size.max()
        )
        np.testing.assert_allclose(
            other.rows.T @ other.targets, one.rows.T @ one.targets, atol=1e-4
        )
        assert other.unexplained == pytest.approx(one.unexplained + other.unexplained, abs=1e-3)
        # No examples travel, but what any with the same sums could be turned into.
        alike = [np.isclose(other.rows, row).all(axis=1).any() for row in one.rows]
        assert count < 20 or not any(alike)
    # The products of what is in no fold, and no more numbers than the others' features have.
    written = sum(min(fold.num_examples, 40) * 44 for fold in sums.folds) + rest.any() * (820 + 160)
    assert len(packed) <= 4 * written + 8 * 48 * (held + 1) + 400
    if count > 7:
        one, other = closed_form_head(sums), closed_form_head(back)
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "folds",
    [None, "all", 3, [3], [[3]], [[3, 3, 3]], [["3", 3]], [[True, 1]], [[0, 0]], [[-3, 1]], [[3, 4]],
     [[3, 10**9]], [[12, 3]], [[6, 3], [6, 3]], [[3, 2]], [[1, 0]] * 6],
)  # fmt: skip
def test_folds_that_the_payload_has_not_are_refused(folds: Any) -> None:
    with pytest.raises(UpdateError):
        decode_head_sums(written(folds=folds), MANIFEST)


def fold_written(change: Any) -> bytes:
    """A message of one fold of 20 examples of which the numbers are changed."""
    x, y = examples(0, 20, features=40)
    packed = encode_head_sums(sums_of(x, y, folds=np.zeros(20)), linear_manifest())
    from fl_elastic.update.frame import unpack

    _, fields, payload = unpack(packed, linear_manifest(), MessageKind.HEAD_SUMS)
    exact = np.frombuffer(bytes(payload[: 8 * 48]), "<f8").copy()
    rounded = np.frombuffer(bytes(payload[8 * 48 :]), "<f4").copy()
    change(exact, rounded[:800].reshape(20, 40), rounded[800:].reshape(20, 4))
    return pack(MessageKind.HEAD_SUMS, fields, [exact.tobytes(), rounded.tobytes()])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to(1, (3, 4), np.nan), "not finite"),
        (set_to(2, (3, 1), np.inf), "not finite"),
        (set_to(0, 0, np.nan), "not finite"),
        (set_to(0, 1, 1e200), "or larger than"),
        (set_to(0, 41, -3.0), "."),
        (set_to(0, 45, 7.0), "one class"),
        (set_to(2, (3, 1), 9.0), "larger than their squares"),
        # Each of the targets might be so alone, together they cannot.
        (set_to(2, slice(None), 0.4), "larger than their squares"),
    ],
)
def test_what_can_be_no_fold_is_refused(change: Any, words: str) -> None:
    assert decode_head_sums(fold_written(lambda *parts: None), linear_manifest()).num_examples == 20
    with pytest.raises(UpdateError, match=words):
        decode_head_sums(fold_written(change), linear_manifest())


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("features", [5, 40, 200])
def test_features_that_together_explain_more_than_there_is_are_refused(
    features: int, numbers: bool
) -> None:
    """Each pair of them might be so: uncorrelated features, each of which tells the class."""
    goals = np.array([25.0] * 4)
    products, targets = 100.0 * np.eye(features + 1), np.zeros((features + 1, 4))
    targets[-1] = goals
    targets[:-1, 0] = np.sqrt(100.0 * (25.0 - 25.0**2 / 100)) * 0.9
    targets[:-1, 1] = -targets[:-1, 0]
    lie = HeadSums("head.weight", products, targets, goals, not numbers)
    with pytest.raises(UpdateError, match="taken together"):
        decode_head_sums(
            encode_head_sums(lie, linear_manifest(features)), linear_manifest(features)
        )
    # Of which each tells its share, they may be true.
    targets[:-1] /= np.sqrt(2 * features)
    decode_head_sums(encode_head_sums(lie, linear_manifest(features)), linear_manifest(features))


@pytest.mark.parametrize("features", [40, 200])
def test_correlations_that_no_features_can_have_together_are_refused(features: int) -> None:
    products = np.full((features + 1, features + 1), -50.0) + 150.0 * np.eye(features + 1)
    products[-1, :-1] = products[:-1, -1] = 0.0
    goals = np.array([25.0] * 4)
    targets = np.zeros((features + 1, 4))
    targets[-1] = goals
    lie = HeadSums("head.weight", products, targets, goals, True)
    with pytest.raises(UpdateError, match="taken together"):
        decode_head_sums(
            encode_head_sums(lie, linear_manifest(features)), linear_manifest(features)
        )


def written(change: Any = None, **header: Any) -> bytes:
    """The sums of the data with changed numbers or header fields."""
    found = head_sums(MODEL, data()).without_folds()
    if change is not None:
        change(found)
    packed = encode_head_sums(found, MANIFEST)
    if not header:
        return packed
    from fl_elastic.update.frame import unpack

    _, fields, payload = unpack(packed, MANIFEST, MessageKind.HEAD_SUMS)
    return pack(MessageKind.HEAD_SUMS, fields | header, [bytes(payload)])


def change_of(part: str, place: Any, value: float) -> Any:
    def change(sums: HeadSums) -> None:
        getattr(sums, part)[place] = value

    return change


@pytest.mark.parametrize(
    ("change", "header", "words"),
    [
        (change_of("products", (1, 1), np.nan), {}, "not finite"),
        (change_of("products", (1, 0), 1e9), {}, "larger than their squares"),
        (change_of("products", (1, 1), -1.0), {}, "less than their means"),
        (change_of("targets", (0, 0), 1e9), {}, "larger than their squares"),
        (change_of("targets", (-1, 0), 9.0), {}, "."),
        (change_of("squares", 0, 1e9), {}, "each in one class"),
        (None, {"num_examples": 0}, "num_examples"),
        (None, {"num_examples": 10**12}, "num_examples"),
        (None, {"num_examples": "many"}, "num_examples"),
        (None, {"indices": [0]}, "payload|linear"),
        (None, {"indices": [1]}, "linear"),
        (None, {"indices": []}, "linear"),
        (None, {"indices": [99]}, "outside"),
        (None, {"classes": "yes"}, "classes"),
    ],
)
def test_what_can_be_no_sums_is_refused(change: Any, header: dict[str, Any], words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        decode_head_sums(written(change, **header), MANIFEST)


def test_every_cut_and_every_changed_byte_is_noticed() -> None:
    packed = written()
    assert_damage_is_noticed(
        packed, lambda data: decode_head_sums(data, MANIFEST),
        range(0, 8 * len(packed), 7), range(0, len(packed), 7),
    )  # fmt: skip


def test_a_server_believes_so_many_examples() -> None:
    with pytest.raises(UpdateError, match="num_examples"):
        decode_head_sums(written(), MANIFEST, Limits(max_examples=10))


def test_sums_of_another_layer_or_kind_do_not_add() -> None:
    x, y = examples(0, 10)
    with pytest.raises(UpdateError, match="do not add"):
        sums_of(x, y) + sums_of(x, y, classes=False)


@pytest.mark.parametrize("missing", [1.0, 1.001, 1.02])
def test_sums_that_are_hardly_those_of_examples_take_a_stronger_penalty(missing: float) -> None:
    """Along one direction they say that features do not move, or move by less than nothing."""
    x, y = examples(0, 60)
    honest = sums_of((x - x.mean(axis=0)) / x.std(axis=0), y)
    along = np.append(np.ones(6) / 6**0.5, 0.0)
    moved = missing * np.outer(along, along) * (along @ honest.products @ along)
    products = honest.products - moved
    head = closed_form_head(
        HeadSums("w", products, honest.targets, honest.squares, True).with_folds(honest.folds)
    )
    assert np.isfinite(head.weight).all() and np.isfinite(head.error) and head.penalty > 0.01


@pytest.mark.parametrize("times", [1e-30, 1e-12, 1e12, 1e37])
def test_the_unit_of_the_targets_changes_no_choice(times: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 6))
    y = x[:, :2] + 3 * rng.normal(size=(60, 2))
    usual, other = (closed_form_head(sums_of(x, k * y, classes=False)) for k in (1.0, times))
    assert usual.penalty > 0.01
    assert (other.penalty, other.error) == (usual.penalty, pytest.approx(usual.error, rel=1e-5))
    np.testing.assert_allclose(other.weight / times, usual.weight, rtol=1e-5)


def test_sums_that_no_examples_can_have_are_refused() -> None:
    honest = sums_of(*examples(0, 60))
    products = honest.products.copy()
    products[0, 1] = products[1, 0] = 1e9
    with pytest.raises(UpdateError, match="not the sums of examples"):
        closed_form_head(
            HeadSums("w", products, honest.targets, honest.squares, True).with_folds(honest.folds)
        )
