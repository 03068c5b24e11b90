"""Evaluating: mean loss and accuracy over every example, and the model as it was."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import Batch, Reiterable, conv_net, images, loss_fn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic.errors import TrainingError
from fl_elastic.losses import own_loss_or_cross_entropy
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training import evaluate


def together(batches: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@pytest.mark.parametrize("last", [6, 1])
def test_loss_and_accuracy_are_means_over_examples(last: int) -> None:
    batches = [*images(3), images(1, size=last, seed=5)[0]]
    model = conv_net()
    found = evaluate(model, loss_fn, Reiterable(batches))
    inputs, targets = together(batches)
    with torch.no_grad():
        outputs = model.eval()(inputs)
    assert found.num_examples == 18 + last
    assert found.loss == pytest.approx(loss_fn(outputs, targets).item(), rel=1e-5)
    assert found.accuracy == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert 0 < found.accuracy < 1


def test_the_model_is_left_as_it_was() -> None:
    model = conv_net()
    model[1].eval()
    torch.autograd.backward(loss_fn(model(images()[0][0]), images()[0][1]))
    before = Snapshot(model)
    evaluate(model, loss_fn, images(2))
    assert before.differences() == []
    model.eval()
    evaluate(model, loss_fn, images(2))
    assert not any(module.training for module in model.modules())


def test_modes_are_restored_after_an_error() -> None:
    model = conv_net()
    model[4].eval()
    before = Snapshot(model)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("x")

    with pytest.raises(KeyError):
        evaluate(model, loss, images(1))
    assert before.differences() == []


@pytest.mark.parametrize("empty", [[], Reiterable([])])
def test_an_empty_loader_is_one_line(empty: Any) -> None:
    with pytest.raises(TrainingError, match="the test loader gave no batch"):
        evaluate(conv_net(), loss_fn, empty)


def test_a_batch_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(TrainingError) as caught:
        evaluate(conv_net(), loss_fn, [(torch.randn(4, 9), torch.zeros(4, dtype=torch.long))])
    assert "\n" not in str(caught.value)


def _mean_of(outputs: Any, targets: Any) -> Tensor:
    del targets
    outputs = outputs["boxes"] if isinstance(outputs, dict) else outputs
    return outputs.float().square().mean()  # type: ignore[no-any-return]


class _Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"boxes": self.layer(x)}


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (_Dictionary(), torch.zeros(4, dtype=torch.long)),
        (nn.Unflatten(1, (2, 3)), torch.zeros(4, 3, dtype=torch.long)),
        (nn.Unflatten(1, (6, 1, 1)), torch.zeros(4, 1, 1, dtype=torch.long)),
        (nn.Linear(6, 3), torch.rand(4)),
        (nn.Linear(6, 1), torch.zeros(4, dtype=torch.long)),
        (nn.Linear(6, 3), torch.rand(4, 3)),
    ],
    ids=["dict", "tokens", "segments", "regression", "one output", "soft labels"],
)
def test_no_accuracy_is_said_where_none_was_computed(model: nn.Module, targets: Tensor) -> None:
    batches = [(torch.randn(4, 6), targets)]
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    assert evaluate(model, _mean_of, batches).accuracy is None


def test_classes_that_the_loss_shifts_leave_no_accuracy() -> None:
    batches = [
        (torch.randn(4, 6), torch.tensor([1, 2, 1, 2])),
        (torch.randn(2, 6), torch.tensor([3, 1])),
    ]
    found = evaluate(nn.Linear(6, 3), lambda out, targets: cross_entropy(out, targets - 1), batches)
    assert found.accuracy is None and found.num_examples == 6


def test_a_margin_that_the_loss_subtracts_in_place_leaves_the_accuracy_alone() -> None:
    def with_margin(out: Tensor, targets: Tensor) -> Tensor:
        out[range(len(targets)), targets] -= 9.0
        return cross_entropy(out, targets)

    torch.manual_seed(0)
    model, batches = nn.Linear(6, 3), [(torch.randn(6, 6), torch.arange(6) % 3) for _ in range(3)]
    known = evaluate(model, cross_entropy, batches).accuracy
    assert evaluate(model, with_margin, batches).accuracy == known and known


def test_one_batch_without_class_targets_leaves_no_accuracy() -> None:
    good = (torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    odd = (torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.long))
    model = nn.Linear(6, 3)
    assert evaluate(model, _mean_of, [good]).accuracy is not None
    for batches in ([good, odd], [odd, good]):
        assert evaluate(model, _mean_of, batches).accuracy is None


def test_metrics_are_means_over_the_examples_of_the_batches_that_have_them() -> None:
    batches = [(torch.zeros(n, 6), torch.full((n,), float(n))) for n in (4, 2)]

    def found(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        del outputs
        told = {"target": targets.mean()}
        return told | ({"large": 1.0} if len(targets) == 4 else {})

    metrics = evaluate(nn.Linear(6, 3), _mean_of, batches, metrics_fn=found).metrics
    assert metrics == {"target": pytest.approx(20 / 6), "large": 1.0}
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (0.5, "metrics_fn returned a float"),
        ({"f1": float("nan")}, "returned nan for 'f1'"),
        ({"f1": "high"}, "returned str for 'f1'"),
        ({"f1": torch.zeros(3)}, "returned Tensor for 'f1'"),
        ({"f1": 10**400}, "returned int for 'f1'"),
    ],
)
def test_metrics_that_are_no_numbers_are_one_clear_error(returned: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        evaluate(conv_net(), loss_fn, images(1), metrics_fn=lambda outputs, targets: returned)


class Sentences(nn.Module):
    """Gives its scores as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.inner(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Recall:
    """A metric that is no mean over batches, in the form that torchmetrics has."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found = self.all = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.found += int(((outputs.argmax(1) == 0) & (targets == 0)).sum())
        self.all += int((targets == 0).sum())

    def compute(self) -> dict[str, float]:
        return {"recall": self.found / self.all}

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        self.update(outputs, targets)
        return {"recall": 0.5}


def test_a_collection_of_metrics_computes_them_for_all_examples() -> None:
    batches, model = [*images(3), images(1, size=1, seed=5)[0]], conv_net().eval()
    inputs, targets = together(batches)
    metric, expected = Recall(), Recall()
    with torch.no_grad():
        expected.update(model(inputs), targets)
    # What it held before is neither counted nor lost.
    metric.found, metric.all = 9, 11
    for _ in range(2):
        assert evaluate(model, loss_fn, batches, metrics_fn=metric).metrics == expected.compute()
    assert (metric.found, metric.all) == (9, 11)


def test_collections_of_torchmetrics_are_those_of_one_batch() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    batches, model = [*images(3), images(1, size=2, seed=5)[0]], conv_net().eval()
    inputs, targets = together(batches)
    classes = model(inputs).shape[1]
    metrics = torchmetrics.MetricCollection(
        {
            "f1": torchmetrics.F1Score("multiclass", num_classes=classes, average="macro"),
            "auroc": torchmetrics.AUROC("multiclass", num_classes=classes),
        }
    )
    found = evaluate(model, loss_fn, batches, metrics_fn=metrics).metrics
    metrics.update(model(inputs).detach(), targets)
    assert found == pytest.approx({name: float(each) for name, each in metrics.compute().items()})


def test_scores_that_a_model_calls_logits_count_as_well() -> None:
    model, x = Sentences(), torch.randn(10, 4)
    labels = model.inner(x).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    found = evaluate(model, own_loss_or_cross_entropy, [{"x": x, "labels": labels}])
    assert found.accuracy == 0.7


def test_so_they_do_in_outputs_that_are_no_mapping() -> None:
    """As in the data classes of other libraries, from which a head in closed form takes them as well."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(x))

    model, x = Named(), torch.randn(10, 4)
    labels = model.inner(x).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    found = evaluate(model, lambda out, targets: cross_entropy(out.logits, targets), [(x, labels)])
    assert found.accuracy == 0.7


class Pictures(nn.Module):
    """Takes a list of pictures, as detectors do, and returns a list of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 2)

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        return [self.score(each.mean((1, 2))) for each in pictures]


def test_lists_count_as_many_examples_as_they_have_entries() -> None:
    """Of unlike batches the mean is over pictures, not over their channels."""

    def error(outputs: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        pairs = zip(outputs, targets, strict=True)
        return torch.stack([(out - each["y"]).square().mean() for out, each in pairs]).mean()

    generator = torch.Generator().manual_seed(0)
    sizes = (7, 2)
    batches = [
        (
            [torch.randn(3, 5, 5, generator=generator) for _ in range(size)],
            [{"y": torch.randn(2, generator=generator)} for _ in range(size)],
        )
        for size in sizes
    ]
    model = Pictures()
    found = evaluate(model, error, batches)
    with torch.no_grad():
        losses = [float(error(model(pictures), targets)) for pictures, targets in batches]
    assert found.num_examples == sum(sizes)
    assert found.loss == pytest.approx((7 * losses[0] + 2 * losses[1]) / 9)


def test_a_client_without_such_data_is_told_so() -> None:
    with pytest.raises(TrainingError, match="the loader is None"):
        evaluate(nn.Linear(2, 2), nn.functional.mse_loss, cast(Any, None))


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("how", ["function", "partial", "module"])
def test_examples_whose_class_the_loss_ignores_do_not_count(ignored: int, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    given = {"ignore_index": ignored}
    losses: dict[str, Any] = {
        "function": cross_entropy if ignored == -100 else nn.CrossEntropyLoss(**given),
        "partial": partial(cross_entropy, **given),
        "module": nn.CrossEntropyLoss(**given),
    }
    batches = []
    for count, known in ((10, 5), (6, 1), (8, 8), (4, 0)):
        targets = torch.randint(2, (count,))
        targets[known:] = ignored
        batches.append((torch.randn(count, 4), targets))
    found = evaluate(model, losses[how], batches)
    inputs, targets = together(batches)
    with torch.no_grad():
        outputs = model(inputs)
    counts = targets != ignored
    assert found.num_examples == 14 == int(counts.sum())
    assert found.loss == pytest.approx(
        cross_entropy(outputs, targets, ignore_index=ignored).item(), rel=1e-5
    )
    right = (outputs.argmax(1) == targets)[counts].float().mean().item()
    assert found.accuracy == pytest.approx(right)


def test_tokens_that_are_all_ignored_do_not_end_an_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 7))
    batches = [(torch.randint(7, (2, 5)), torch.randint(7, (2, 5))) for _ in range(2)]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.transpose(1, 2), targets)

    cut_off = (torch.randint(7, (2, 5)), torch.full((2, 5), -100))
    assert evaluate(model, loss, [*batches, cut_off]) == evaluate(model, loss, batches)


@pytest.mark.parametrize("sizes", [(1,) * 9, (4, 4, 1), (9,)])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 9.0, 0.0])])
@pytest.mark.parametrize("ignored", [-100, 255, 0])
def test_the_loss_is_that_of_all_targets_together_however_they_are_batched(
    ignored: int, weight: Tensor | None, sizes: tuple[int, ...]
) -> None:
    """Pixels, of which some pictures have few that count and one has none."""
    torch.manual_seed(0)
    model, inputs = nn.Conv2d(2, 3, 1), torch.randn(9, 2, 4, 4)
    targets = torch.randint(3, (9, 4, 4))
    targets[:6, :3], targets[4] = ignored, ignored
    batches = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    given: dict[str, Any] = {"ignore_index": ignored, "weight": weight}
    with torch.no_grad():
        wanted = cross_entropy(model(inputs), targets, **given).item()
    for loss in (nn.CrossEntropyLoss(**given), partial(cross_entropy, **given)):
        assert evaluate(model, loss, batches).loss == pytest.approx(wanted, rel=1e-5)
    with_log = nn.Sequential(model, nn.LogSoftmax(1))
    assert evaluate(with_log, nn.NLLLoss(**given), batches).loss == pytest.approx(wanted, rel=1e-5)


def test_rows_weighted_by_class_are_those_of_one_batch_as_well() -> None:
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 3), torch.randn(30, 4), torch.randint(3, (30,))
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.1]))
    with torch.no_grad():
        wanted = loss(model(inputs), targets).item()
    found = evaluate(model, loss, list(zip(inputs.split(7), targets.split(7), strict=True)))
    assert found.loss == pytest.approx(wanted, rel=1e-5) and found.num_examples == 30
