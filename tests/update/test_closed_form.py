"""The head in closed form: the ridge regression of all examples together, whoever holds them."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import lstsq  # type: ignore[import-untyped]
from torch import nn

from fl_elastic.errors import TrainingError, UpdateError
from fl_elastic.training.head_sums import head_sums
from fl_elastic.update import Manifest
from fl_elastic.update.closed_form import closed_form_head
from fl_elastic.update.frame import Kind, pack
from fl_elastic.update.head_sums import HeadSums, decode_head_sums, encode_head_sums
from fl_elastic.update.partial import Limits

Floats = NDArray[np.float64]


def examples(seed: int, count: int, features: int = 6, classes: int = 4) -> tuple[Floats, Floats]:
    """Features of unlike size and place, and classes that follow from them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)) * 10.0 ** rng.uniform(-1, 1, features) + rng.normal(
        size=features
    )
    scores = x @ rng.normal(size=(features, classes)) + rng.normal(size=(count, classes))
    return x, np.eye(classes)[scores.argmax(axis=1)]


def sums_of(x: Floats, y: Floats, *, classes: bool = True) -> HeadSums:
    rows = np.hstack([x, np.ones((len(x), 1))])
    return HeadSums("head.weight", rows.T @ rows, rows.T @ y, (y**2).sum(axis=0), classes)


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


def left_out_error(x: Floats, y: Floats, penalty: float) -> float:
    """Generalised cross-validation by its definition, with the whole hat matrix."""
    rows = (x - x.mean(axis=0)) / x.std(axis=0)
    gram = rows.T @ rows + penalty * len(x) * np.eye(x.shape[1])
    hat = rows @ np.linalg.solve(gram, rows.T) + 1 / len(x)
    left = y - hat @ y
    return float((left**2).sum() / len(x) / (1 - np.trace(hat) / len(x)) ** 2)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_ridge_regression_of_all_examples(seed: int) -> None:
    x, y = examples(seed, 60)
    numbers = y @ np.random.default_rng(seed).normal(size=(4, 2))
    head = closed_form_head(sums_of(x, numbers, classes=False))
    weight, bias = slow_ridge(x, numbers, head.penalty)
    np.testing.assert_allclose(head.weight, weight.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias, bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_the_penalty_is_the_one_of_least_expected_error(seed: int) -> None:
    x, y = examples(seed, 30, features=12)
    head = closed_form_head(sums_of(x, y))
    tried = [left_out_error(x, y, p) for p in 10.0 ** np.arange(-4, 2.01, 0.25)]
    assert left_out_error(x, y, head.penalty) == pytest.approx(min(tried), rel=1e-6)
    variance = float(((y - y.mean(axis=0)) ** 2).sum() / len(y))
    assert head.error == pytest.approx(min(min(tried) / variance, 1.0), rel=1e-6)


@pytest.mark.parametrize("parts", [2, 7])
def test_whoever_holds_the_examples_the_head_is_the_same(parts: int) -> None:
    x, y = examples(3, 90)
    order = y.argmax(axis=1).argsort()  # each client holds other classes
    pieces = [sums_of(x[rows], y[rows]) for rows in np.array_split(order, parts)]
    apart, together = closed_form_head(reduce(add, pieces)), closed_form_head(sums_of(x, y))
    np.testing.assert_allclose(apart.weight, together.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(apart.bias, together.bias, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_examples_than_features_give_a_finite_head(count: int) -> None:
    head = closed_form_head(sums_of(*examples(2, count, features=40)))
    assert np.isfinite(head.weight).all() and np.isfinite(head.bias).all()


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
    ],
)
def test_what_has_no_such_head_is_said(model: nn.Module, targets: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        head_sums(model, [(torch.randn(2, 5), targets)])


def test_no_batch_is_begun_after_the_time_is_up() -> None:
    assert head_sums(Net(), data(), seconds=-1.0).num_examples == 4


MODEL = Net()
MANIFEST = Manifest.of(MODEL)


def test_sums_come_back_from_the_wire() -> None:
    found = head_sums(MODEL, data())
    back = decode_head_sums(encode_head_sums(found, MANIFEST), MANIFEST)
    assert (back.weight, back.classes, back.num_examples) == ("head.weight", True, 11)
    np.testing.assert_allclose(back.products, found.products, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(back.targets, found.targets, rtol=1e-6, atol=1e-6)


def test_features_far_from_zero_lose_nothing_on_the_wire() -> None:
    model = nn.Linear(2, 1)
    manifest = Manifest.of(model)
    x = np.random.default_rng(0).normal(size=(200, 2)) + 1e5
    y = (x[:, :1] - 1e5) * 3
    rows = np.hstack([x, np.ones((200, 1))])
    sums = HeadSums("weight", rows.T @ rows, rows.T @ y, (y**2).sum(axis=0), False)
    head = closed_form_head(decode_head_sums(encode_head_sums(sums, manifest), manifest))
    np.testing.assert_allclose(head.weight, [[3, 0]], atol=0.01)


def few_examples(seed: int, count: int, features: int = 40) -> HeadSums:
    """Sums over fewer examples than features: some stand still, some are copies, some examples are equal."""
    x, y = examples(seed, count, features=features)
    x = np.maximum(x, 0.0)
    x[:, seed % features], x[:, 3] = 2.0, x[:, 4]
    x[count // 2 :][:2] = x[0]
    return sums_of(x, y)


@pytest.mark.parametrize("count", [1, 2, 7, 20])
@pytest.mark.parametrize("seed", range(4))
def test_sums_over_few_examples_travel_as_few_rows(seed: int, count: int) -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(40, 4))
    manifest, sums = Manifest.of(model), few_examples(seed, count)
    packed = encode_head_sums(sums, manifest)
    back = decode_head_sums(packed, manifest)
    size = np.sqrt(np.outer(np.diag(sums.products), np.diag(sums.products)))
    assert (np.abs(back.products - sums.products) <= 1e-6 * size + 1e-9).all()
    np.testing.assert_allclose(back.targets, sums.targets, rtol=1e-5, atol=1e-5)
    # Never more numbers than the examples themselves have.
    assert len(packed) < 4 * (count * 40 + 4 * 40) + 8 * (40 + 8) + 300
    if count > 2:
        one, other = closed_form_head(sums), closed_form_head(back)
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-3, atol=1e-4)


def test_as_many_examples_as_features_travel_as_products() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(40, 4))
    manifest = Manifest.of(model)
    sizes = [len(encode_head_sums(few_examples(0, count), manifest)) for count in (21, 40, 200)]
    assert max(sizes) - min(sizes) < 10


@pytest.mark.parametrize("rows", [-1, 0, 1, 4, 10**9, "all", None, True])
def test_a_count_of_rows_that_the_payload_has_not_is_refused(rows: Any) -> None:
    with pytest.raises(UpdateError):
        decode_head_sums(written(rows=rows), MANIFEST)


def test_rows_that_are_not_finite_or_beyond_any_use_are_refused() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(40, 4))
    manifest = Manifest.of(model)
    packed = encode_head_sums(few_examples(0, 5), manifest)
    from fl_elastic.update.frame import unpack

    _, fields, payload = unpack(packed, manifest, Kind.HEAD_SUMS)
    for value in (np.nan, np.inf, -np.inf):
        numbers = np.frombuffer(bytes(payload), "<f4").copy()
        numbers[2 * (40 + 8) + 7] = value
        with pytest.raises(UpdateError, match="not finite"):
            decode_head_sums(pack(Kind.HEAD_SUMS, fields, [numbers.tobytes()]), manifest)


def written(change: Any = None, **header: Any) -> bytes:
    """The sums of the data with changed numbers or header fields."""
    found = head_sums(MODEL, data())
    if change is not None:
        change(found)
    packed = encode_head_sums(found, MANIFEST)
    if not header:
        return packed
    from fl_elastic.update.frame import unpack

    _, fields, payload = unpack(packed, MANIFEST, Kind.HEAD_SUMS)
    return pack(Kind.HEAD_SUMS, fields | header, [bytes(payload)])


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
    for end in range(0, len(packed), 7):
        with pytest.raises(UpdateError):
            decode_head_sums(packed[:end], MANIFEST)
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(UpdateError):
            decode_head_sums(bytes(damaged), MANIFEST)


def test_a_server_believes_so_many_examples() -> None:
    with pytest.raises(UpdateError, match="num_examples"):
        decode_head_sums(written(), MANIFEST, Limits(max_examples=10))


def test_sums_of_another_layer_or_kind_do_not_add() -> None:
    x, y = examples(0, 10)
    with pytest.raises(UpdateError, match="do not add"):
        sums_of(x, y) + sums_of(x, y, classes=False)
