"""Forgetting by dampening: squares against a slow loop, the rule on toy numbers, and a class of real digits."""

from __future__ import annotations

from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from small_models import KeptInEval, vectors
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError, UpdateError
from fl_elastic.losses import classification_loss
from fl_elastic.methods.dampening.forget import SquaredGradients, dampen, forget, squared_gradients
from fl_elastic.named_models import build_model
from fl_elastic.update.dampening import alpha_by_share, dampening_factors

Batch = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


def batches(count: int = 3, size: int = 4, seed: int = 0) -> list[Batch]:
    torch.manual_seed(seed)
    return [(torch.randn(size, 1, 8, 8), torch.randint(0, 3, (size,))) for _ in range(count)]


def sums(*values: float, examples: int = 1) -> SquaredGradients:
    return SquaredGradients({"weight": np.float32([list(values)])}, examples)


def layer(*values: float) -> nn.Linear:
    made = nn.Linear(len(values), 1, bias=False)
    made.weight.data = torch.tensor([list(values)])
    return made


@pytest.mark.parametrize("seed", range(3))
def test_squares_are_those_of_every_example_for_itself(seed: int) -> None:
    model, loader = net(seed), batches(seed=seed)
    model.get_parameter("0.bias").requires_grad_(False)
    found = squared_gradients(model, classification_loss, loader)
    slow = deepcopy(model).eval()
    trained = {name: p for name, p in slow.named_parameters() if p.requires_grad}
    expected = {name: torch.zeros_like(p) for name, p in trained.items()}
    for inputs, targets in loader:
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(slow(x[None]), y[None])
            gradients = torch.autograd.grad(loss, [*trained.values()])
            whole = torch.cat([each.flatten() for each in gradients])
            for name, gradient in zip(trained, gradients, strict=True):
                expected[name] += (gradient / whole.norm()) ** 2
    assert found.examples == 12 and set(found.sums) == set(expected)
    for name, each in expected.items():
        torch.testing.assert_close(torch.from_numpy(found.sums[name]), each)


def test_what_a_model_keeps_in_eval_mode_is_computed_for_each_example() -> None:
    """It belongs to the graph of one example."""
    models = KeptInEval(keeps=True), KeptInEval(keeps=False)
    found, expected = (squared_gradients(m, classification_loss, vectors(3)) for m in models)
    assert models[0].kept == {} and models[0].training
    for name, each in expected.sums.items():
        np.testing.assert_allclose(found.sums[name], each, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "none"),
    [(classification_loss, -100), (nn.CrossEntropyLoss(ignore_index=255), 255)],
)
def test_examples_without_a_target_and_empty_batches_are_passed_over(loss: Any, none: int) -> None:
    """As for training: no loss is a mean over nothing."""
    model, (first, second) = net(1), batches(2, seed=1)
    known = squared_gradients(model, classification_loss, [first, second])
    inputs = torch.cat([second[0], torch.ones(2, 1, 8, 8)])
    targets = torch.cat([second[1], torch.full((2,), none)])
    empty = (torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    ignored = (torch.ones(3, 1, 8, 8), torch.full((3,), none))
    found = squared_gradients(model, loss, [empty, first, ignored, (inputs, targets)])
    assert found.examples == known.examples == 8
    for name, value in known.sums.items():
        np.testing.assert_array_equal(found.sums[name], value)
    nothing: Any = None
    with pytest.raises(TrainingError, match="the loader is None"):
        squared_gradients(model, classification_loss, nothing)


def test_an_example_counts_as_much_however_certain_the_model_is_of_it() -> None:
    model, loader = net(), batches(1)

    def certain(outputs: Tensor, targets: Tensor) -> Tensor:
        return classification_loss(outputs, targets) * 1e-25

    usual, small = (
        squared_gradients(model, loss, loader) for loss in (classification_loss, certain)
    )
    assert sum(each.sum() for each in small.sums.values()) == pytest.approx(4.0, rel=1e-4)
    for name, each in usual.sums.items():
        np.testing.assert_allclose(small.sums[name], each, rtol=1e-3, atol=1e-7)
    nothing = squared_gradients(model, lambda outputs, targets: 0 * outputs.sum(), loader)
    assert nothing.examples == 4 and not any(each.any() for each in nothing.sums.values())


@pytest.mark.parametrize("examples", [2, 7, 40])
def test_few_weights_change_where_few_examples_go(examples: int) -> None:
    chance = np.random.default_rng(examples)
    few, others = (
        SquaredGradients(
            {n: chance.gamma(2.0, size=size).astype(np.float32) for n, size in
             {"first": (50, 20), "second": (30,)}.items()},
            count,
        )
        for count in (examples, 100 - examples)
    )  # fmt: skip
    everything = few + others
    ratios = sorted(
        float(ours / examples) / float(all_ / 100)
        for name in few.sums
        for ours, all_ in zip(few.sums[name].flat, everything.sums[name].flat, strict=True)
    )
    place = (100 - np.log(1 + examples)) / 100 * (len(ratios) - 1)
    below, above = ratios[int(place)], ratios[int(place) + 1]
    alpha = alpha_by_share(few, everything)
    assert alpha == pytest.approx(below + (place - int(place)) * (above - below), rel=1e-5)
    changed = sum(int((each != 1).sum()) for each in dampening_factors(few, everything).values())
    assert changed == sum(each > alpha for each in ratios) > 0


def test_what_nobody_else_needs_goes_and_what_all_need_alike_stays() -> None:
    alone = SquaredGradients({"weight": np.float32([[1.0, 0.0]])}, 2)
    factors = dampening_factors(alone, alone + sums(0.0, 0.0, examples=8))["weight"]
    assert factors.tolist() == [[pytest.approx(0.2), 1.0]]
    even = dampening_factors(sums(1.0, 1.0), sums(4.0, 5.0, examples=4))["weight"]
    assert even.tolist() == [[1.0, 1.0]]
    with pytest.raises(UpdateError, match="2 of 2 examples are to be forgotten"):
        dampening_factors(alone, alone)


def test_the_model_is_left_as_it_was() -> None:
    model, loader = net().train(), batches()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, chances = deepcopy(model.state_dict()), torch.get_rng_state()
    squared_gradients(model, classification_loss, loader)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert model.training and torch.equal(torch.get_rng_state(), chances)


def test_devices_add_up_to_all_of_their_examples() -> None:
    model, loader = net(), batches(4)
    first, second = (
        squared_gradients(model, classification_loss, part) for part in (loader[:1], loader[1:])
    )
    whole = squared_gradients(model, classification_loss, loader)
    assert (first + second).examples == whole.examples
    for name, each in whole.sums.items():
        np.testing.assert_allclose((first + second).sums[name], each, rtol=1e-5, atol=1e-7)
    with pytest.raises(UpdateError, match="two models"):
        _ = first + sums(1.0)


def test_only_what_matters_more_than_alpha_times_as_much_is_dampened() -> None:
    # Twice as much is not more than twice; nothing to both is nothing; nothing to the others leaves a share.
    model = layer(1.0, 1.0, 1.0, 1.0)
    found = dampen(model, sums(2.0, 3.0, 0.0, 1.0), sums(4.0, 4.0, 0.0, 1.0, examples=4), alpha=2.0)
    assert found == {"weight": 2}
    assert model.weight.tolist() == [[1.0, pytest.approx(1 / 3), 1.0, 0.25]]
    model = layer(1.0, 1.0)
    assert dampen(model, sums(2.0, 2.1), sums(4.0, 4.0, examples=4), alpha=2.0) == {"weight": 1}
    assert model.weight[0, 0] == 1.0


@pytest.mark.parametrize(
    ("value", "examples", "why"),
    [
        (-1.0, 4, "negative or not finite"),
        (float("nan"), 4, "negative or not finite"),
        (float("inf"), 4, "negative or not finite"),
        (1.0, 0, "of 0 examples"),
    ],
)
def test_what_a_device_says_is_no_sum_if_it_cannot_be_one(
    value: float, examples: int, why: str
) -> None:
    with pytest.raises(UpdateError, match=why):
        sums(1.0, value, examples=examples)


def test_no_weight_grows_however_small_alpha_is() -> None:
    model = layer(2.0, -2.0)
    dampen(model, sums(3.0, 8.0), sums(16.0, 16.0, examples=4), alpha=0.5)
    assert model.weight.tolist() == [[2.0, -1.0]]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"alpha": 4.0}, "selects nothing: 1 of 4 examples"),
        ({"alpha": 0.0}, "must be above 0"),
        ({"alpha": float("nan")}, "must be above 0"),
    ],
)
def test_numbers_that_mean_nothing_change_nothing(given: dict[str, float], why: str) -> None:
    model = layer(1.0)
    with pytest.raises(UpdateError, match=why):
        dampen(model, sums(1.0), sums(1.0, examples=4), **given)
    assert model.weight.item() == 1.0


def test_other_models_and_other_data_are_refused() -> None:
    model, loader = net(), batches(1)
    with pytest.raises(UpdateError, match="another model"):
        dampen(model, sums(1.0), sums(1.0, examples=4))
    with pytest.raises(TrainingError, match="no example"):
        squared_gradients(model, classification_loss, [])
    with pytest.raises(TrainingError, match="the loss on a probe batch is nan"):
        squared_gradients(model, classification_loss, [(loader[0][0] * float("nan"), loader[0][1])])
    before = deepcopy(model.state_dict())
    with pytest.raises(TrainingError, match="no example"):
        forget(model, classification_loss, loader, iter(()))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.slow
def test_classes_of_digits_are_forgotten_and_the_others_are_kept() -> None:
    """From a model that has just learned them, and from the same one long after."""
    data = load_digits()
    x = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.tensor(np.random.default_rng(0).permutation(len(y)))
    train, test = order[:800], order[1300:]
    model = build_model("digits_cnn", (1, 8, 8), 10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(0)

    def accuracy(of: nn.Module, rows: Tensor) -> float:
        with torch.no_grad():
            return float((of.eval()(x[rows]).argmax(dim=1) == y[rows]).float().mean())

    for passes in (12, 8):
        model.train()
        for _ in range(passes):
            for rows in torch.split(train[torch.randperm(len(train))], 32):
                optimizer.zero_grad()
                classification_loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        by_digit = []
        for digit in range(10):
            theirs = train[y[train] == digit]
            by_digit.append(squared_gradients(model, classification_loss, [(x[theirs], y[theirs])]))
        everything = reduce(add, by_digit)
        gone, kept = [], []
        for digit, few in enumerate(by_digit):
            after = deepcopy(model)
            assert sum(dampen(after, few, everything).values()) > 0
            others = test[y[test] != digit]
            assert accuracy(model, test[y[test] == digit]) > 0.9
            gone.append(accuracy(after, test[y[test] == digit]))
            kept.append(accuracy(after, others) - accuracy(model, others))
        assert np.mean(gone) < 0.05
        assert np.mean(kept) > -0.02


def test_what_cannot_forget_is_refused_in_a_sentence() -> None:
    frozen = net().requires_grad_(False)
    with pytest.raises(ModelError, match="requires a gradient"):
        squared_gradients(frozen, classification_loss, batches())
    for alpha in ("3", float("inf")):
        with pytest.raises(UpdateError, match="must be above 0"):
            dampen(layer(1.0), sums(4.0), sums(4.0, examples=9), alpha=alpha)  # type: ignore[arg-type]


def test_others_instead_of_everything_are_refused_before_anything_changes() -> None:
    model = net()
    before = deepcopy(model.state_dict())
    theirs, others = batches(1, seed=1), batches(6, seed=2)
    with pytest.raises(UpdateError, match="the latter must include the former"):
        forget(model, classification_loss, theirs, others, alpha=1.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert forget(model, classification_loss, theirs, [*theirs, *others], alpha=1.5)
