"""Sums for a head of every kind of task: classes, numbers, several labels, tokens, maps; and what has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums, encode_head_sums
from fl_elastic.errors import TrainingError
from fl_elastic.losses import own_loss_or_cross_entropy
from fl_elastic.methods.dampening.forget import digest_of
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import solve_head
from fl_elastic.training.read_out import read_out
from fl_elastic.update import Manifest

Floats = NDArray[np.float64]
Batches = list[tuple[Tensor, Tensor]]
FEATURES, CLASSES = 6, 3


def in_batches(inputs: Tensor, targets: Tensor, size: int = 4) -> Batches:
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def assert_sums(found: HeadSums, features: Any, wanted: Any) -> None:
    """The sums against those of rows, taken one by one."""
    products, targets = np.zeros((FEATURES + 1,) * 2), np.zeros((FEATURES + 1, CLASSES))
    squares = np.zeros(CLASSES)
    for row, goal in zip(np.asarray(features), np.asarray(wanted), strict=True):
        row = np.append(row, 1.0).astype(np.float64)
        products += np.outer(row, row)
        targets += np.outer(row, goal)
        squares += goal**2
    np.testing.assert_allclose(found.products, products, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.targets, targets, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.squares, squares, rtol=1e-6, atol=1e-6)


def ridge(rows: Floats, goals: Floats, penalty: float) -> tuple[Floats, Floats]:
    """Ridge regression of standardised features by numpy's least squares, a row for each penalised weight."""
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    extra = np.sqrt(penalty * len(rows)) * np.eye(rows.shape[1])
    weight = np.linalg.lstsq(
        np.vstack([(rows - mean) / spread, extra]),
        np.vstack([goals - goals.mean(axis=0), np.zeros((rows.shape[1], goals.shape[1]))]),
        rcond=None,
    )[0]
    return (weight / spread[:, None]).T, goals.mean(axis=0) - mean @ (weight / spread[:, None])


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", ["map", "tokens", "sequence"])
def test_each_place_is_an_example(kind: str, ignored: bool, size: int) -> None:
    torch.manual_seed(size)
    inputs, places = {
        "map": (torch.randn(10, FEATURES, size, size), (size, size)),
        "tokens": (torch.randn(10, size, FEATURES), (size,)),
        "sequence": (torch.randn(10, FEATURES, size), (size,)),
    }[kind]
    model: nn.Module = {
        "map": nn.Conv2d(FEATURES, CLASSES, 1), "tokens": nn.Linear(FEATURES, CLASSES),
        "sequence": nn.Conv1d(FEATURES, CLASSES, 1),
    }[kind]  # fmt: skip
    classes = torch.randint(0, CLASSES, (10, *places))
    if ignored:
        classes = classes.masked_fill(torch.rand(classes.shape) < 0.3, -100)
        classes[0] = -100
    loss_fn = None if kind == "tokens" else functional.cross_entropy
    found = head_sums(model, in_batches(inputs, classes), loss_fn=loss_fn)
    rows = (inputs if kind == "tokens" else inputs.movedim(1, -1)).reshape(-1, FEATURES)
    known = classes.reshape(-1) >= 0
    wanted = np.eye(CLASSES)[classes.reshape(-1)[known].numpy()]
    assert found.classes and found.num_examples == int(known.sum())
    assert_sums(found, rows[known].numpy(), wanted)
    # Folds are of whole inputs, with no more rows than give the same sums.
    held = sum(fold.rows.T @ fold.rows for fold in found.folds)
    np.testing.assert_allclose(held, found.products, rtol=1e-6, atol=1e-6)
    assert 1 < len(found.folds) <= 5
    manifest = Manifest.of(model)
    back = decode_head_sums(encode_head_sums(found, manifest), manifest)
    np.testing.assert_allclose(back.products, found.products, rtol=1e-5, atol=1e-4)
    head, name = solve_head(model, in_batches(inputs, classes))
    assert name == "weight"
    weight, bias = ridge(rows[known].double().numpy(), wanted, head.penalty)
    own = model(inputs)
    own = (own if kind == "tokens" else own.movedim(1, -1)).reshape(-1, CLASSES)
    slow = rows.numpy() @ weight.T + bias
    assert (own.argmax(dim=1).numpy() == slow.argmax(axis=1)).mean() > 0.99


def test_a_fold_holds_all_places_of_its_inputs() -> None:
    torch.manual_seed(0)
    inputs, classes = torch.randn(5, FEATURES, 8, 8), torch.randint(0, CLASSES, (5, 8, 8))
    found = head_sums(nn.Conv2d(FEATURES, CLASSES, 1), in_batches(inputs, classes, 2))
    assert [len(fold.rows) for fold in found.folds] == [FEATURES + 1] * 5
    left = list(range(5))
    for fold in found.folds:
        assert fold.num_examples == pytest.approx(64)
        for each in left:
            rows = inputs[each].movedim(0, -1).reshape(-1, FEATURES).double().numpy()
            rows = np.hstack([rows, np.ones((64, 1))])
            if np.allclose(fold.rows.T @ fold.rows, rows.T @ rows):
                goals = np.eye(CLASSES)[classes[each].reshape(-1).numpy()]
                np.testing.assert_allclose(fold.rows.T @ fold.targets, rows.T @ goals, atol=1e-9)
                np.testing.assert_allclose(fold.squares, goals.sum(axis=0))
                left.remove(each)
                break
    assert not left


def test_the_penalty_of_maps_is_that_of_least_error_on_images_held_out() -> None:
    """Places of one image say hardly more than one of them; by single places no penalty would be needed."""
    torch.manual_seed(1)
    images = torch.randn(20, 30, 1, 1) + 0.01 * torch.randn(20, 30, 4, 4)
    classes = torch.randint(0, CLASSES, (20, 1, 1)).expand(20, 4, 4).contiguous()
    head, _ = solve_head(nn.Conv2d(30, CLASSES, 1), in_batches(images, classes))
    assert head.penalty >= 1.0 and head.error > 0.8


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_several_labels_are_numbers_and_become_log_odds_where_the_loss_takes_these(
    kind: torch.dtype,
) -> None:
    torch.manual_seed(2)
    inputs = torch.randn(300, FEATURES)
    labels = (inputs[:, :CLASSES] + 0.3 * torch.randn(300, CLASSES) > 0.6).to(kind)
    data, model = in_batches(inputs, labels, 50), nn.Linear(FEATURES, CLASSES)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets.float())

    plain = head_sums(model, data)
    assert not plain.classes
    assert_sums(plain, inputs.numpy(), labels.double().numpy())
    found = head_sums(model, data, loss_fn=loss)
    assert_sums(found, inputs.numpy(), 4 * labels.double().numpy() - 2)
    numbers = head_sums(model, data, loss_fn=lambda o, t: functional.mse_loss(o, t.float()))
    np.testing.assert_array_equal(numbers.targets, plain.targets)
    head, _ = solve_head(model, data, loss_fn=loss)
    right = ((model(inputs) > 0) == labels.bool()).float().mean()
    assert right > 0.9
    weight, bias = ridge(inputs.double().numpy(), 4 * labels.double().numpy() - 2, head.penalty)
    np.testing.assert_allclose(head.weight, weight, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(head.bias, bias, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_small_counts_are_no_log_odds(first: bool) -> None:
    """Whichever batch comes first: a loss of log rates is smaller below zero too, as most counts are zeros."""
    torch.manual_seed(0)
    rare = torch.poisson(torch.full((40, CLASSES), 0.2)).clamp(max=1)
    often = torch.poisson(torch.full((40, CLASSES), 3.0))
    targets = torch.cat([rare, often] if first else [often, rare])
    inputs = torch.randn(80, FEATURES)
    batches = in_batches(inputs, targets, 40)
    rates = nn.PoissonNLLLoss(log_input=False)
    found = head_sums(nn.Linear(FEATURES, CLASSES), batches, loss_fn=rates)
    assert_sums(found, inputs, targets)
    with pytest.raises(TrainingError, match="such as the logarithm of a rate"):
        head_sums(nn.Linear(FEATURES, CLASSES), batches, loss_fn=nn.PoissonNLLLoss())
    # Zeros alone tell nothing of the loss.
    batches = [(inputs[:40], torch.zeros(40, CLASSES)), (inputs[40:], often)]
    with pytest.raises(TrainingError, match="as shares, but another batch has targets outside"):
        head_sums(nn.Linear(FEATURES, CLASSES), batches, loss_fn=nn.PoissonNLLLoss())


LOSSES_OF_NUMBERS: dict[str, tuple[Any, bool]] = {
    "squares": (functional.mse_loss, True),
    "absolutes": (nn.L1Loss(), True),
    "directions": (lambda o, t: (1 - functional.cosine_similarity(o, t)).mean(), True),
    "logarithms of rates": (lambda o, t: functional.mse_loss(o.exp(), t), False),
    "places of labels": (lambda o, t: nn.MultiLabelMarginLoss()(o, t.argsort()), False),
}


@pytest.mark.parametrize("loss", LOSSES_OF_NUMBERS)
@pytest.mark.parametrize("begins", ["alike", "as shares", "as all"])
def test_numbers_are_regressed_where_the_loss_takes_outputs_for_them(
    loss: str, begins: str
) -> None:
    """A head fitted to anything else would be far worse than none: 3e9 instead of 25 for logarithms."""
    loss_fn, fits = LOSSES_OF_NUMBERS[loss]
    torch.manual_seed(5)
    inputs = torch.randn(80, FEATURES)
    targets = 3 * inputs @ torch.randn(FEATURES, CLASSES)
    if begins != "as all":
        targets[:20] = 2.0 if begins == "alike" else torch.rand(20, CLASSES)
    batches, model = in_batches(inputs, targets, 20), nn.Linear(FEATURES, CLASSES)
    if fits:
        solve_head(model, batches, loss_fn=loss_fn)
        flat = targets.mean(0).expand_as(targets)
        assert loss_fn(model(inputs), targets) < loss_fn(flat, targets)
    else:
        with pytest.raises(TrainingError, match="interprets outputs as something else"):
            solve_head(model, batches, loss_fn=loss_fn)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("read", ["last", "1@flat", "auto"])
def test_a_yes_or_no_may_lack_the_axis_of_its_output(kind: torch.dtype, read: str) -> None:
    torch.manual_seed(2)
    inputs = torch.randn(300, FEATURES)
    answers = (inputs[:, 0] + 0.1 * torch.randn(300) > 0.3).to(kind)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())

    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    done = read_out(model, in_batches(inputs, answers, 50), read=read, loss_fn=loss)
    with torch.no_grad():
        scores = done.model(inputs)
    assert ((scores[:, 0] > 0) == answers.bool()).float().mean() > 0.9
    # A client that has only met one of them sends sums of the same kind.
    alone = head_sums(model, [(inputs[:9], torch.zeros(9, dtype=kind))], loss_fn=loss)
    assert not alone.classes and alone.targets[-1] == -2 * 9


def test_one_number_may_lack_the_axis_of_its_output_and_a_loss_that_spreads_it_is_refused() -> None:
    torch.manual_seed(3)
    inputs = torch.randn(60, FEATURES)
    targets = 3 * inputs[:, 0] + 100
    data = in_batches(inputs, targets, 20)
    found = head_sums(
        nn.Linear(FEATURES, 1), data,
        loss_fn=lambda outputs, t: functional.mse_loss(outputs.squeeze(1), t),
    )  # fmt: skip
    head = closed_form_head(found)
    np.testing.assert_allclose(head.weight[0], [3, 0, 0, 0, 0, 0], atol=2e-2)
    np.testing.assert_allclose(head.bias, [100], atol=2e-2)
    # Each output is compared with the targets of all examples.
    spread = nn.MSELoss()
    with (
        pytest.warns(UserWarning, match="broadcasting"),
        pytest.raises(TrainingError, match="interprets outputs as something else"),
    ):
        head_sums(nn.Linear(FEATURES, 1), data, loss_fn=spread)


def test_maps_of_numbers_are_regressed() -> None:
    torch.manual_seed(3)
    inputs, true = torch.randn(12, FEATURES, 4, 4), torch.randn(CLASSES, FEATURES)
    targets = torch.einsum("nfhw,cf->nchw", inputs, true) + 5
    model = nn.Sequential(nn.Conv2d(FEATURES, CLASSES, 1))
    found = head_sums(model, in_batches(inputs, targets), loss_fn=functional.mse_loss)
    head = closed_form_head(found)
    np.testing.assert_allclose(head.weight, true.numpy(), atol=1e-2)
    np.testing.assert_allclose(head.bias, np.full(CLASSES, 5.0), atol=1e-2)


def test_maps_are_read_at_the_last_layer_unless_a_place_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(20, FEATURES, 4, 4)
    data = in_batches(inputs, inputs[:, :CLASSES].argmax(1))
    model = nn.Sequential(nn.Conv2d(FEATURES, 9, 1), nn.Conv2d(9, CLASSES, 1))
    loss = functional.cross_entropy
    assert read_out(model, data, loss_fn=loss).model is model
    assert "gives scores of shape (2, 3, 4, 4): the head reads the input of the last" in caplog.text
    with pytest.raises(TrainingError, match="read='last' reads the input of the last layer"):
        read_out(model, data, read="0@grid2", loss_fn=loss)


SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip


def words(count: int = 12) -> dict[str, Tensor]:
    given = torch.randint(3, 40, (count, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": given, "attention_mask": torch.ones_like(given)}


def test_text_is_classified_whole_by_token_and_by_several_labels() -> None:
    torch.manual_seed(0)
    given = words()
    own = own_loss_or_cross_entropy
    whole = head_sums(
        hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
        [{**given, "labels": torch.arange(12) % 3}], loss_fn=own,
    )  # fmt: skip
    assert (whole.weight, whole.num_examples) == ("classifier.weight", 12)
    labels = (torch.arange(96) % 3).reshape(12, 8).masked_fill(given["input_ids"] > 30, -100)
    tokens = head_sums(
        hf.BertForTokenClassification(hf.BertConfig(**SMALL)),
        [{**given, "labels": labels}], loss_fn=own,
    )  # fmt: skip
    assert tokens.num_examples == int((labels >= 0).sum())
    several = head_sums(
        hf.BertForSequenceClassification(
            hf.BertConfig(**SMALL, problem_type="multi_label_classification")
        ),
        [{**given, "labels": (torch.arange(36) % 2).float().reshape(12, 3)}], loss_fn=own,
    )  # fmt: skip
    assert not several.classes and set(np.unique(several.squares)) == {48.0}


def next_words(tied: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=tied
    )
    given = words()
    return hf.GPT2LMHeadModel(config), {**given, "labels": given["input_ids"]}


class Detector(nn.Module):
    """Returns boxes of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return [{"boxes": self.box(row[None])} for row in x]


class InUnits(nn.Module):
    """Brings the layer's output to the targets' units, in place: it is the same tensor afterwards."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        y *= 5.0
        y += 100.0
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.back.weight = self.code.weight

    def forward(self, x: Tensor) -> Any:
        return self.back(self.code(x))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: next_words(tied=True), "another layer as well"),
        (lambda: next_words(tied=False), "predicts the next token"),
        (lambda: (Detector(), (torch.randn(3, 4), torch.zeros(3, 4))), "is that of a linear layer"),
        (lambda: (Tied(), (torch.randn(3, 4), torch.zeros(3, 4))), "another layer as well"),
        (lambda: (InUnits(), (torch.randn(3, 4), torch.zeros(3, 1))), "no linear layer put out"),
        (
            lambda: (
                nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)),
                (torch.randn(3, 4), torch.tensor([0, 1, 2])),
            ),
            "no linear layer put out",
        ),
        (
            lambda: (nn.Linear(200, 100_000), (torch.randn(2, 200), torch.tensor([0, 1]))),
            "too large to send",
        ),
        (
            lambda: (nn.Conv2d(4, 3, 3), (torch.randn(2, 4, 3, 3), torch.zeros(2, 1, 1).long())),
            "that no linear layer put out",
        ),
        (
            lambda: (nn.Linear(4, 3), (torch.randn(2, 4), torch.full((2,), -100))),
            "no target counts",
        ),
        (
            lambda: (nn.Linear(4, 3), (torch.randn(2, 5, 4), torch.full((2, 5), 255))),
            "-100 is ignored",
        ),
        (
            lambda: (nn.Linear(4, 3), (torch.randn(3, 4), torch.tensor([9, -100, 1]))),
            r"classes of shape \(3,\) below 3 .*; targets are int64 of shape \(3,\), from 1 to 9",
        ),
    ],
)
def test_what_has_no_head_in_closed_form_is_said(
    make: Callable[[], tuple[nn.Module, Any]], said: str
) -> None:
    model, batch = make()
    with pytest.raises(TrainingError, match=said):
        head_sums(model, [batch], loss_fn=own_loss_or_cross_entropy)
    assert not any(module._forward_hooks for module in model.modules())


class Threefold(nn.Linear):
    """Has an nn.Linear's weight, and does something else with it."""

    def forward(self, x: Tensor) -> Any:
        return 3.0 * super().forward(x)


class WithAdapter(nn.Linear):
    """Adds a product of low rank, as LoRA does."""

    def __init__(self, given: int, outputs: int) -> None:
        super().__init__(given, outputs)
        self.down, self.up = nn.Linear(given, 1), nn.Linear(1, outputs)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.up(self.down(x))


class Quantised(nn.Linear):
    """Rounds its weight, as training aware of quantisation does."""

    def forward(self, x: Tensor) -> Any:
        step = self.weight.abs().max() / 127
        return functional.linear(x, torch.round(self.weight / step) * step, self.bias)


def hooked() -> nn.Module:
    layer = nn.Linear(FEATURES, CLASSES)
    layer.register_forward_hook(lambda _, __, out: out.softmax(dim=1))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Threefold(FEATURES, CLASSES),
        lambda: WithAdapter(FEATURES, CLASSES),
        lambda: Quantised(FEATURES, CLASSES),
        hooked,
    ],
)
def test_a_last_layer_that_does_more_than_multiply_gets_no_head(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    data = in_batches(torch.randn(20, FEATURES), torch.arange(20) % CLASSES)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), make())
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(TrainingError, match="is not its weight times its input"):
        solve_head(model, data)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_rounding_makes_no_layer_another(kind: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    inputs = (size * torch.randn(40, 500)).to(kind)
    layer = nn.Linear(500, CLASSES).to(kind)
    assert head_sums(layer, in_batches(inputs, torch.arange(40) % CLASSES)).num_examples == 40
    if kind is torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            found = head_sums(layer, in_batches(inputs, torch.arange(40) % CLASSES))
        assert found.num_examples == 40


class ByName(nn.Module):
    """Calls its last layer with a named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.layer(input=torch.relu(x))


def test_a_last_layer_may_be_called_by_the_name_of_its_argument() -> None:
    torch.manual_seed(0)
    inputs, classes = torch.randn(20, FEATURES), torch.arange(20) % CLASSES
    found = head_sums(ByName(), in_batches(inputs, classes))
    assert_sums(found, inputs.relu(), functional.one_hot(classes, CLASSES))


@pytest.mark.parametrize("read", ["auto", "1@flat"])
def test_inputs_that_the_model_cannot_take_are_refused_with_their_shape(read: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(TrainingError, match=r"inputs of shape \(8, 5\)"):
        read_out(model, [(torch.randn(8, 5), torch.arange(8) % 3)], read=read)


@pytest.mark.parametrize("ignored", [0, 2, 255, -1])
@pytest.mark.parametrize("read", ["last", "1@flat", "auto"])
def test_the_class_that_the_loss_ignores_is_in_no_head(read: str, ignored: int) -> None:
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    if ignored not in (0, 2):
        y[::3] = ignored
    kept = y != ignored

    def scores(x: Tensor, y: Tensor, loss_fn: nn.Module) -> Tensor:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        found = read_out(model, [(x, y)], read=read, loss_fn=loss_fn)
        return found.model(torch.eye(6)).detach()

    found = scores(x, y, nn.CrossEntropyLoss(ignore_index=ignored))
    expected = scores(x[kept], y[kept], nn.CrossEntropyLoss())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
def test_weights_of_classes_which_no_head_in_closed_form_has_are_said(
    weights: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    data = in_batches(torch.randn(8, FEATURES), torch.arange(8).remainder(CLASSES))
    with caplog.at_level("WARNING", "fl_elastic"):
        head_sums(
            nn.Linear(FEATURES, CLASSES), data, loss_fn=nn.CrossEntropyLoss(torch.tensor(weights))
        )
    assert ("weights its classes" in caplog.text) == (len(set(weights)) > 1)


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_a_loss_that_weighs_what_is_there_is_said_to_be_another(
    weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(4)
    inputs, labels = torch.randn(40, FEATURES), torch.randint(0, 2, (40, CLASSES)).float()
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.full((CLASSES,), weight))
    solve_head(nn.Linear(FEATURES, CLASSES), in_batches(inputs, labels), loss_fn=loss)
    assert ("weights its classes" in caplog.text) == (weight != 1.0)


@pytest.mark.parametrize("empty", [None, []], ids=["none", "list"])
@pytest.mark.parametrize("read", ["last", "auto"])
def test_a_batch_without_examples_is_passed_over_wherever_it_comes(read: str, empty: Any) -> None:
    data: list[Any] = in_batches(torch.randn(32, 4), torch.arange(32) % 3, 8)

    def error(batches: list[Any]) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        return read_out(model, batches, read=read).head.error

    expected = error(data)
    for place in (0, 2, 4):
        assert error([*data[:place], empty, *data[place:]]) == expected
    assert digest_of([empty, *data], "") == digest_of(data, "")
