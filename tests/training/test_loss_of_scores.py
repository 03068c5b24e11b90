"""A head in closed form is of a loss that takes scores for scores, wherever in the model it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic import fine_tune
from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.losses import own_loss_or_cross_entropy
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.read_out import read_out

CLASSES = 3


def rows(count: int = 120) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :CLASSES].argmax(1)


def data(change: Callable[[Tensor], Tensor] = lambda classes: classes) -> list[Batch]:
    inputs, classes = rows()
    return list(zip(inputs.split(30), change(classes).split(30), strict=True))


def net(*ends: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES), *ends)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def one_hot(classes: Tensor) -> Tensor:
    return functional.one_hot(classes, CLASSES).float()


def of_probabilities(outputs: Tensor, classes: Tensor) -> Tensor:
    return functional.nll_loss(torch.log(outputs + 1e-8), classes)


def from_one(outputs: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, classes - 1)


class Halved(nn.Module):
    """A function of half of the scores, which is no link function that is known."""

    def __init__(self, link: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.link = link

    def forward(self, scores: Tensor) -> Tensor:
        return self.link(scores / 2)


@pytest.mark.parametrize("read", ["auto", "1@flat"])
@pytest.mark.parametrize(
    ("end", "loss_fn", "change", "said"),
    [
        (
            Halved(nn.LogSoftmax(1)), functional.nll_loss, None, "logarithms of probabilities",
        ),
        (Halved(nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), one_hot, "logarithms of"),
        (Halved(nn.Softmax(1)), of_probabilities, None, "interprets outputs as probabilities"),
        (Halved(nn.Sigmoid()), functional.binary_cross_entropy, one_hot, "between 0 and 1"),
        # No example is of the last class, whose number would be too large.
        (nn.Identity(), from_one, lambda classes: classes.clamp(1), "the target minus one"),
    ],
)  # fmt: skip
def test_a_loss_of_other_outputs_gets_no_head_elsewhere(
    end: nn.Module, loss_fn: Any, change: Any, said: str, read: str
) -> None:
    """A readout puts out scores, of which such a loss is wrong: of log_softmax it would fall for ever."""
    model = net(end)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(TrainingError, match=said):
        fine_tune(model, loss_fn, sgd, data(change or (lambda classes: classes)), read=read)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("read", ["auto", "1@flat", "last"])
@pytest.mark.parametrize(
    ("end", "loss_fn", "change"),
    [
        (nn.LogSoftmax(1), functional.nll_loss, None),
        (nn.Softmax(1), of_probabilities, None),
        (nn.Softmax(1), functional.cross_entropy, None),
        (nn.Sigmoid(), functional.binary_cross_entropy, one_hot),
    ],
)
def test_a_head_elsewhere_ends_in_the_link_function_of_the_model(
    end: nn.Module, loss_fn: Any, change: Any, read: str
) -> None:
    """It is the head of a model without the function, which comes after it."""
    given, inputs = data(change or (lambda classes: classes)), rows()[0]
    plain = functional.cross_entropy
    if change is not None:
        plain = functional.binary_cross_entropy_with_logits
    scores = read_out(net(), given, read=read, loss_fn=plain).model.eval()(inputs)
    found = read_out(net(end), given, read=read, loss_fn=loss_fn).model.eval()
    torch.testing.assert_close(found(inputs), end(scores), rtol=1e-4, atol=1e-5)


def test_a_readout_of_a_model_of_one_number_has_its_shape() -> None:
    inputs, classes = rows()
    given = list(zip(inputs.split(30), (2.0 * classes - inputs[:, 0]).split(30), strict=True))
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    found = read_out(nn.Sequential(body, nn.Flatten(0)), given, read="0.1@flat")
    plain = read_out(body, [(x, y[:, None]) for x, y in given], read="1@flat")
    assert found.model(inputs).shape == (120,)
    torch.testing.assert_close(found.model(inputs), plain.model(inputs)[:, 0])


def mean_squares(outputs: Tensor, classes: Tensor) -> Tensor:
    return functional.mse_loss(outputs, one_hot(classes).to(outputs))


def of_each_class(outputs: Tensor, classes: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, one_hot(classes).to(outputs))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.4),
        nn.CrossEntropyLoss(reduction="sum"),
        # The first class counts for nothing.
        nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 1.0])),
        lambda outputs, classes: functional.multi_margin_loss(outputs.float(), classes),
        lambda outputs, classes: functional.cross_entropy(outputs / 20, classes),
        mean_squares,
        of_each_class,
    ],
)
def test_a_loss_of_scores_gets_one(loss_fn: Any, kind: torch.dtype) -> None:
    if isinstance(loss_fn, nn.CrossEntropyLoss) and loss_fn.weight is not None:
        loss_fn.weight = loss_fn.weight.to(kind)
    batches = [(inputs.to(kind), classes) for inputs, classes in data()]
    done = fine_tune(net().to(kind), loss_fn, sgd, batches)
    assert done.final_error < 0.7


@pytest.mark.parametrize("classes", [2, 3])
def test_smoothed_labels_of_places_are_not_those_of_the_next_token(classes: int) -> None:
    maps = torch.randn(20, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    labels = maps[:, :classes].argmax(1)
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.3)
    found = head_sums(nn.Conv2d(4, classes, 1), [(maps, labels)], loss_fn=smoothed)
    assert found.num_examples == labels.numel()


def test_a_first_batch_of_which_nothing_counts_tells_nothing_of_the_loss() -> None:
    (inputs, classes), *rest = data(lambda classes: classes.clamp(1))
    batches = [(inputs, torch.full_like(classes, -100)), *rest]
    with pytest.raises(TrainingError, match="the target minus one"):
        head_sums(net(), batches, loss_fn=lambda o, t: from_one(o, t.clamp(min=-99)))


class Named(nn.Module):
    """Puts out its scores under a name, and a loss of its own if it knows the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(rows)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": of_each_class(logits, labels.argmax(1))}


def of_named(outputs: Any, classes: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.get("logits"), classes)


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_of_more_than_scores_is_read_at_the_last_layer(
    own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere a model puts out scores alone: the loss could not be computed, or would be another one."""
    batches: Any = data()
    if own:
        batches = [{"rows": inputs, "labels": one_hot(classes)} for inputs, classes in batches]
    loss_fn: Any = own_loss_or_cross_entropy if own else of_named
    done = fine_tune(Named(), loss_fn, sgd, batches, epochs=1)
    assert isinstance(done.model, Named) and done.reads == ""
    assert "needs more of the model's outputs, a dict, than their scores" in caplog.text
    with pytest.raises(TrainingError, match="read='last'"):
        fine_tune(Named(), loss_fn, sgd, batches, read="layers.1@flat")


class TakesLabels(nn.Module):
    """Could compute a loss of its own, and puts out its scores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> Any:
        return self.layers(rows)


@pytest.mark.parametrize("names", [("labels", "rows"), ("rows", "labels")])
def test_no_head_reads_the_labels(names: tuple[str, str]) -> None:
    """Collators of transformers put them first. Nothing in the data tells them: they are random."""
    generator = torch.Generator().manual_seed(2)
    found = {
        "rows": torch.randn(120, 6, generator=generator),
        "labels": torch.rand(120, CLASSES, generator=generator).round(),
    }
    batches: Any = [{name: found[name][i : i + 30] for name in names} for i in range(0, 120, 30)]
    done = fine_tune(TakesLabels(), functional.binary_cross_entropy_with_logits, sgd, batches)
    assert done.head_error > 0.9


class WithAuxiliary(nn.Module):
    """Puts out a second tensor of scores in train mode, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.beside = net(), nn.Linear(6, CLASSES)

    def forward(self, rows: Tensor) -> Any:
        scores = self.layers(rows)
        return (scores, self.beside(rows)) if self.training else scores


def of_both(outputs: tuple[Tensor, Tensor], classes: Tensor) -> Tensor:
    main, auxiliary = outputs
    return functional.cross_entropy(main, classes) + functional.cross_entropy(auxiliary, classes)


def test_a_loss_of_train_mode_alone_gets_a_head_at_the_last_layer_and_none_elsewhere() -> None:
    assert head_sums(WithAuxiliary(), data(), loss_fn=of_both).num_examples == 120
    with pytest.raises(TrainingError, match="cannot take the scores of a linear layer"):
        fine_tune(WithAuxiliary(), of_both, sgd, data())


class AboutTheMean(nn.Module):
    """Follows the scores that it has seen, as of a prior of the classes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.calls = 0

    def forward(self, outputs: Tensor, classes: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * outputs.detach().mean(dim=0))
        return functional.cross_entropy(outputs - self.mean, classes)


@pytest.mark.parametrize("read", ["last", "1@flat", "auto"])
def test_a_loss_is_left_as_it_was(read: str) -> None:
    loss_fn = AboutTheMean()
    assert fine_tune(net(), loss_fn, sgd, data(), read=read, epochs=0).head_error < 0.7
    assert not loss_fn.mean.any() and loss_fn.calls == 0


@pytest.mark.parametrize("read", ["last", "1@flat", "auto"])
def test_a_loss_that_is_no_number_is_said_to_be_none(read: str) -> None:
    each = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(ModelError, match=r"must return one number as a tensor, got shape \(30,\)"):
        fine_tune(net(), each, sgd, data(), read=read)


def test_without_a_loss_scores_are_all_that_is_asked_for() -> None:
    assert read_out(net(nn.LogSoftmax(1)), data(), read="1@flat").head.error < 0.7
