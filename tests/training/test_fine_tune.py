"""Fine-tuning on one device: a solved head, training above a cut, a solved head; or nothing at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_loop import assert_weights, plain_steps
from small_models import images, loss_fn, same_weights, weights_of
from torch import Tensor, nn

import fl_elastic
from fl_elastic import Budget
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.errors import ElasticError, PlanError, SettingError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.losses import own_loss
from fl_elastic.training.fine_tune import fine_tune
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import solve_head

CUT = "6"


def build(bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 8), (8, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3, bias=bias)
    )
    # As norms of a pretrained model, which have seen data.
    with torch.no_grad():
        for inputs, _ in images(8):
            model.train()(inputs)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0003)


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def below(name: str) -> bool:
    return int(name.partition(".")[0]) < int(CUT)


def step_by_step(model: nn.Module, data: list[Batch], epochs: int) -> None:
    """What it should do, the slow way: nothing is kept, and everything runs as it is."""

    def solve() -> None:
        head = closed_form_head(head_sums(model, data), intercept=model[-1].bias is not None)
        with torch.no_grad():
            model[-1].weight.copy_(torch.from_numpy(head.weight))
            if model[-1].bias is not None:
                model[-1].bias.copy_(torch.from_numpy(head.bias))

    solve()
    trained = [p for n, p in model.named_parameters() if not below(n) and not n.startswith("11")]
    optimizer = sgd(trained)
    model.eval()
    for _ in range(epochs):
        plain_steps(model, optimizer, data, loss_fn)
    solve()


@pytest.mark.parametrize("bias", [True, False])
def test_it_does_what_the_slow_way_does(bias: bool) -> None:
    data = told_apart(6)
    start = build(bias)
    ours, slow = copy.deepcopy(start), copy.deepcopy(start)
    done = fine_tune(ours, loss_fn, sgd, data, cut=CUT, epochs=2, read="last")
    step_by_step(slow, data, 2)
    inputs = torch.cat([each for each, _ in data])
    with torch.no_grad():
        # Features are kept in half precision. A head's weights may differ more than what comes out.
        torch.testing.assert_close(ours.eval()(inputs), slow.eval()(inputs), rtol=1e-2, atol=1e-2)
    for name, value in slow.state_dict().items():
        if not name.startswith("11"):
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=5e-3, atol=5e-3)
        if below(name) or "running" in name:
            assert torch.equal(ours.state_dict()[name], start.state_dict()[name])
    assert not torch.equal(ours[6].weight, start[6].weight)
    assert (done.cut, done.report.steps) == (CUT, 12)
    assert done.kept and 0 < done.final_error < done.head_error < 1
    forward = done.report.forward
    assert forward is not None and forward.refused == "" and forward.computed == 0


def test_the_cut_is_where_most_is_gained_if_none_is_named() -> None:
    data, model = images(6, seed=5), build()
    done = fine_tune(model, loss_fn, sgd, data, epochs=1, read="last")
    assert done.cut in {name.partition(".")[0] for name in state(model)} - {"11"}
    start = state(build())
    for name, value in state(model).items():
        lower = int(name.partition(".")[0]) < int(done.cut)
        assert torch.equal(value, start[name]) or not lower


def test_numbers_are_fitted_as_well() -> None:
    data = [(inputs, torch.randn(len(inputs), 3)) for inputs, _ in images(6, seed=5)]
    model = build()
    before = sum(nn.functional.mse_loss(model.eval()(x), y).item() for x, y in data)
    done = fine_tune(model, nn.functional.mse_loss, sgd, data, cut=CUT, epochs=1, read="last")
    assert sum(nn.functional.mse_loss(model(x), y).item() for x, y in data) < before
    assert done.report.steps == 6


@pytest.mark.parametrize(("read", "epochs"), [("1@flat", None), ("1@flat", 0), ("last", 1)])
def test_the_head_is_that_of_the_loss_whether_layers_are_trained_or_not(
    read: str, epochs: int | None
) -> None:
    """Of labels that go together, whose loss takes log-odds, and of classes that the loss ignores."""
    torch.manual_seed(0)
    inputs = torch.randn(240, 6)
    labels = (inputs[:, :3] > torch.tensor([0.5, 0.0, -0.5])).float()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))

    odds = nn.functional.binary_cross_entropy_with_logits
    done = fine_tune(
        model(), odds, sgd, list(zip(inputs.split(40), labels.split(40), strict=True)),
        read=read, epochs=epochs,
    )  # fmt: skip
    with torch.no_grad():
        said = done.model.eval()(inputs) > 0
    assert (said == labels.bool()).float().mean() > 0.9

    classes = labels.sum(dim=1).long().clamp(max=2)
    unknown = torch.arange(240) % 2 == 0
    given = classes.where(~unknown, 0)
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    done = fine_tune(
        model(), ignoring, sgd, list(zip(inputs.split(40), given.split(40), strict=True)),
        read=read, epochs=epochs,
    )  # fmt: skip
    with torch.no_grad():
        assert not (done.model.eval()(inputs).argmax(1) == 0).any()


def test_features_with_a_large_common_part_are_computed_again_and_not_rounded() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(200, 6)
    data = [(x, (x[:, 0] > 0).long()) for x in inputs.split(25)]
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2))
    with torch.no_grad():
        model[0].bias.fill_(1e4)
        model[1].bias.copy_(-model[1].weight @ model[0].bias)

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    done = fine_tune(model, loss_fn, still, data, cut="1", epochs=1, read="last")
    assert done.report is not None and done.report.forward is not None
    assert "change if stored as fp16" in done.report.forward.refused
    assert done.final_error == pytest.approx(done.head_error, rel=1e-3) and done.kept


@pytest.mark.parametrize(
    ("model", "read"),
    [
        (nn.Linear(6, 2), "last"),
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), "auto"),
        (nn.Linear(6, 2), "input@random16"),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), "input@flat"),
    ],
)
def test_without_a_layer_below_the_head_it_is_the_head_alone(model: nn.Module, read: str) -> None:
    inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    data = [(x, (x[:, 0] > 0).long()) for x in inputs.split(25)]
    done = fine_tune(model, loss_fn, sgd, data, read=read, epochs=2)
    assert done.report is None and done.cut == "" and done.kept
    assert 0 < done.head_error == done.final_error < 1


@pytest.mark.parametrize("cut", ["", CUT])
def test_a_frozen_head_is_solved_for_and_the_layers_below_it_are_trained(cut: str) -> None:
    data = told_apart(6)
    frozen, plain = build(), build()
    frozen[-1].requires_grad_(False)
    ours = fine_tune(frozen, loss_fn, sgd, data, cut=cut, epochs=2, read="last")
    expected = fine_tune(plain, loss_fn, sgd, data, cut=ours.cut, epochs=2, read="last")
    assert_weights(frozen, plain, rtol=1e-3, atol=1e-3)
    assert ours.final_error == pytest.approx(expected.final_error, rel=1e-2)


def test_of_a_model_that_is_frozen_as_a_whole_the_head_alone_is_solved_for() -> None:
    data, model = told_apart(6), build()
    model.requires_grad_(False)
    done = fine_tune(model, loss_fn, sgd, data, epochs=2, read="last")
    assert done.report is None and 0 < done.head_error == done.final_error < 1


def test_a_budget_is_that_of_the_training() -> None:
    done = fine_tune(
        build(), loss_fn, sgd, images(6), cut="0", epochs=1, budget=Budget(speedup=1.5), read="last"
    )
    assert done.report.plan.predicted_step_seconds < done.report.full_step_seconds


def test_training_that_spoils_what_was_there_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    data, model = told_apart(6), build()
    solved = copy.deepcopy(model)
    solve_head(solved, data)
    torn = fine_tune(
        model, loss_fn, lambda p: torch.optim.SGD(p, lr=0.3), data, cut=CUT, epochs=2, read="last"
    )
    assert not torn.kept and torn.final_error > torn.head_error
    assert "smaller learning rate" in caplog.text
    assert_weights(model, solved, rtol=5e-3, atol=5e-3)


class AsTransformersDo(nn.Module):
    """Takes names, and gives its class scores under one, with a loss if it knows the labels."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(pixels)
        return {"loss": loss_fn(logits, labels), "logits": logits}


def test_a_model_whose_scores_have_a_name_is_fine_tuned_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The same examples are held out of both, whatever else their batches hold.
    monkeypatch.setattr(
        "fl_elastic.training.head_pass.sample_ids",
        lambda inputs: sample_ids(inputs["pixels"] if isinstance(inputs, dict) else inputs),
    )
    data, plain = told_apart(6), build()
    named = AsTransformersDo(copy.deepcopy(plain))
    batches: Any = [{"pixels": inputs, "labels": targets} for inputs, targets in data]
    ours = fine_tune(named, own_loss, sgd, batches, cut=f"layers.{CUT}", epochs=2, read="last")
    expected = fine_tune(plain, loss_fn, sgd, data, cut=CUT, epochs=2, read="last")
    assert ours.head_error == pytest.approx(expected.head_error, rel=1e-2)
    assert ours.kept and ours.final_error == pytest.approx(expected.final_error, rel=1e-2)
    with torch.no_grad():
        scores = named.eval()(**batches[0])["logits"]
        # Features of one of them are kept in half precision.
        torch.testing.assert_close(scores, plain.eval()(data[0][0]), rtol=1e-2, atol=1e-2)


def test_a_model_without_such_a_head_is_told_what_it_gives() -> None:
    model = nn.Sequential(build(), nn.ReLU())
    before = state(model)
    message = (
        r"gives Tensor with scores of shape \(6, 3\) that no linear layer put out.*ElasticTrainer"
    )
    with pytest.raises(TrainingError, match=message):
        fine_tune(model, loss_fn, sgd, images(2), epochs=1, read="last")
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


def told_apart(count: int) -> list[Batch]:
    """Images whose classes can be told apart."""
    return [
        (inputs + targets.reshape(-1, 1, 1, 1).float(), targets)
        for inputs, targets in images(count, seed=5)
    ]


class Augmented:
    """Examples that never come again."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Batch]:
        for inputs, targets in images(6):
            yield inputs + 0.1 * torch.randn_like(inputs), targets


def test_examples_that_change_are_trained_on_as_they_come() -> None:
    done = fine_tune(build(), loss_fn, sgd, Augmented(), cut=CUT, epochs=3, read="last")
    assert done.report.steps == 18
    assert done.report.forward is not None and done.report.forward.found == 0


class Failing:
    """Fails when it is passed over for the nth time."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Batch]:
        self.left -= 1
        yield from images(2)
        if self.left < 0:
            raise OSError("the disk is gone")
        yield from images(2, seed=1)


@pytest.mark.parametrize("passes", range(1, 9))
def test_whatever_fails_the_model_is_as_before(passes: int) -> None:
    model = build()
    before, loader = state(model), Failing(passes)
    try:
        fine_tune(model, loss_fn, sgd, loader, cut=CUT, epochs=1, read="last")
    except OSError:
        assert all(torch.equal(value, before[name]) for name, value in state(model).items())
    else:
        assert loader.left >= 0 and passes > 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda given: given.update(cut="nowhere"), PlanError, "nowhere"),
        (lambda given: given.update(feature_bytes=-1), SettingError, "feature_bytes -1"),
        (lambda given: given.update(loader=[]), TrainingError, "gave no batch"),
        (
            lambda given: given.update(loader=(batch for batch in images(4))),
            TrainingError,
            "the loader is a generator, which can be read only once, .* pass a list or a DataLoader",
        ),
        (lambda given: given.update(loader=5), TrainingError, "the loader is 5: give a list"),
        (
            lambda given: given.update(model=nn.Sequential(build(), nn.Softplus()), cut="0.6"),
            TrainingError,
            "that of a linear layer",
        ),
        (
            lambda given: given.update(loader=[(x, y + 7) for x, y in images(4)]),
            ElasticError,
            "out of bounds",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changed(
    change: Any, error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"model": build(), "loader": images(4), "cut": CUT}
    change(given)
    before = state(given["model"])
    model, loader = given.pop("model"), given.pop("loader")
    with pytest.raises(error, match=message):
        fine_tune(model, loss_fn, sgd, loader, **given, read="last")
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_it_is_found_where_users_look() -> None:
    assert fl_elastic.fine_tune is fine_tune


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("cut", [CUT, ""])
def test_numbers_that_are_none_are_an_error_wherever_they_stand(value: float, cut: str) -> None:
    """The first batches are whole: costs and gradients tell nothing."""
    ((inputs, targets),) = images(1)
    model, data = build(), [*told_apart(3), (inputs * value, targets)]
    before = state(model)
    with pytest.raises(TrainingError, match="not finite"):
        fine_tune(model, loss_fn, sgd, data, cut=cut, epochs=1, read="last")
    assert all(torch.equal(kept, before[name]) for name, kept in state(model).items())


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_head_that_is_computed_from_others_is_refused_and_nothing_changed(name: str) -> None:
    class Twice(nn.Module):
        def forward(self, tensor: Tensor) -> Tensor:
            return 2 * tensor

    model = build()
    nn.utils.parametrize.register_parametrization(model[-1], name, Twice())
    before = weights_of(model)
    with pytest.raises(TrainingError, match="computed from other parameters"):
        fine_tune(model, loss_fn, sgd, images(4), read="last")
    assert same_weights(before, model)
