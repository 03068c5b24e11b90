"""How many examples a batch has is told by what there is one of per example, and never more than there are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop import plain_steps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from fl_elastic import Budget, ElasticTrainer, TrainerOptions
from fl_elastic.errors import TrainingError
from fl_elastic.groups.batch import batch_size, counted
from fl_elastic.groups.forward import outputs_and_loss
from fl_elastic.training import evaluate


def classes(count: int) -> Tensor:
    return torch.arange(count) % 2


GRAPH = SimpleNamespace(num_graphs=3, x=torch.zeros(11, 4))
BATCHES: dict[str, tuple[Any, int]] = {
    "rows": ((torch.zeros(6, 3), classes(6)), 6),
    "one example, without an axis of examples": ((torch.zeros(6), torch.tensor(1)), 1),
    "a bag of instances": ((torch.zeros(9, 3), torch.tensor(1)), 1),
    "time first": ((torch.zeros(20, 4, 3), classes(4)), 4),
    "time first, longer than it is wide": ((torch.zeros(3, 5, 2), classes(5)), 5),
    "time first, beside a first state": (
        ((torch.zeros(9, 4, 3), torch.zeros(1, 4, 8)), classes(4)),
        4,
    ),
    "bags": (((torch.zeros(50), torch.tensor([0, 7, 20])), classes(3)), 3),
    "bags whose offsets end with the last": (
        ((torch.zeros(50), torch.tensor([0, 7, 20, 50])), classes(3)),
        3,
    ),
    "bags without targets": (((torch.zeros(50), torch.tensor([0, 7, 20])), None), 3),
    "packed": ((pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), classes(2)), 2),
    "packed inputs and targets": ((pack_sequence([torch.zeros(5, 2)] * 3),) * 2, 3),
    "graph": ((GRAPH, classes(3)), 3),
    "graph without targets": ((GRAPH, None), 3),
    "nodes, edges and classes of graphs": (
        ((torch.zeros(30, 4), torch.zeros(2, 80), torch.zeros(30)), classes(4)),
        4,
    ),
    "named, edges first": (
        {"edges": torch.zeros(2, 80), "x": torch.zeros(30, 4), "label": classes(4)},
        4,
    ),
    "one class of each token, flat": ((torch.zeros(5, 7), torch.zeros(35).long()), 5),
    "lists of examples": (([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4), 4),
    "a list of examples beside a tensor": (([torch.zeros(7, 3), torch.zeros(5, 3)], classes(2)), 2),
    "more examples than numbers of each": (([torch.zeros(3)] * 6, torch.zeros(6)), 6),
    "several inputs and targets": (((torch.zeros(8, 3),) * 2, (torch.zeros(8), torch.zeros(8))), 8),
    "named targets": ((torch.zeros(8, 3), {"a": torch.zeros(8), "b": torch.zeros(8, 2)}), 8),
    "nested": ((torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]), classes(2)), 2),
    "stacked pictures beside the boxes of each": (
        (torch.zeros(4, 3, 8, 8), [{"boxes": torch.zeros(k, 4)} for k in (1, 0, 3, 2)]),
        4,
    ),
    "one picture beside its three boxes": (
        (torch.zeros(1, 3, 8, 8), [{"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)}]),
        1,
    ),
    "two boxes of each stacked picture": (
        (torch.zeros(4, 3, 8, 8), [torch.zeros(2, 4) for _ in range(4)]),
        4,
    ),
    "named, boxes of each among the inputs": (
        {
            "pixels": torch.zeros(4, 3, 8, 8),
            "labels": [{"boxes": torch.zeros(k, 4)} for k in (1, 2, 3, 2)],
        },
        4,
    ),
    "padded sentences beside the words of each": (
        (torch.zeros(3, 9).long(), [torch.zeros(k) for k in (9, 4, 5)]),
        3,
    ),
    "two targets of each column, two steps": (
        (torch.zeros(2, 8, 4), (torch.zeros(8), torch.zeros(8))),
        8,
    ),
    "as many letters one after the other as times": (
        (torch.zeros(20, 8, 5), (torch.ones(20), torch.full((8,), 2))),
        8,
    ),
    "the same beside the length of each": (
        ((torch.zeros(20, 8, 5), torch.full((8,), 20)), (torch.ones(20), torch.full((8,), 2))),
        8,
    ),
    "as many letters as times, examples first": (
        (torch.zeros(8, 20, 5), (torch.ones(20), torch.full((8,), 2))),
        8,
    ),
    "nothing": ((torch.zeros(0, 3), classes(0)), 0),
    "no packed sequence but words": (((torch.zeros(0), torch.zeros(0)), classes(0)), 0),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_has_as_many_examples_as_there_are(kind: str) -> None:
    batch, expected = BATCHES[kind]
    assert batch_size(batch) == expected


def test_the_users_function_knows_better() -> None:
    tokens = (torch.zeros(20, 4, 3), torch.zeros(20, 4))
    assert batch_size(tokens, lambda inputs, targets: targets.shape[1]) == 4
    for wrong in (-1, 2.5, "four", None):
        with pytest.raises(TrainingError, match="count_examples returned"):
            batch_size(tokens, lambda inputs, targets, wrong=wrong: wrong)  # type: ignore[misc]


@pytest.mark.parametrize("last", [4, 1])
def test_a_loader_knows_how_many_it_draws_where_time_is_first_in_the_targets_as_well(
    last: int,
) -> None:
    rows = TensorDataset(torch.zeros(8 + last, 20, 3), torch.zeros(8 + last, 20))

    def time_first(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        return tuple(torch.stack(each, dim=1) for each in zip(*pairs, strict=True))

    loader = DataLoader(rows, batch_size=4, collate_fn=time_first)
    assert [size for _, size in counted(loader)] == [4, 4, last]
    batches = [[0, 1, 2], [3], [4, 5]]
    loader = DataLoader(rows, batch_sampler=batches, collate_fn=time_first)
    assert [size for _, size in counted(loader)] == [3, 1, 2]
    loader = DataLoader(rows, batch_size=4, collate_fn=time_first, drop_last=True)
    assert [size for _, size in counted(loader)] == [4] * ((8 + last) // 4)


class Backwards(BatchSampler):
    """Gives the last batch, which is smaller, first, as samplers do that sort examples by length."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from reversed(list(super().__iter__()))


def test_the_smallest_batch_of_an_own_batch_sampler_may_come_first() -> None:
    data = TensorDataset(torch.randn(19, 3), torch.randint(2, (19,)))
    loader = DataLoader(data, batch_sampler=Backwards(SequentialSampler(data), 8, drop_last=False))
    assert [size for _, size in counted(loader)] == [3, 8, 8]
    assert evaluate(nn.Linear(3, 2), cross_entropy, loader).num_examples == 19
    trainer = ElasticTrainer(nn.Linear(3, 2), cross_entropy, sgd, budget=Budget(), policy="full")
    assert trainer.fit(loader, epochs=2).num_examples == 19


class InShards(IterableDataset[tuple[Tensor, Tensor]]):
    """Nineteen examples; of two worker processes the second reads three."""

    def __len__(self) -> int:
        return 19

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        own = (range(19),) if worker is None else (range(16), range(16, 19))
        for _ in own[0 if worker is None else worker.id]:
            yield torch.ones(3), torch.tensor(1)


def test_each_worker_of_an_iterable_dataset_ends_with_a_smaller_batch() -> None:
    loader = DataLoader(InShards(), batch_size=8, num_workers=2)
    assert [size for _, size in counted(loader)] == [8, 3, 8]
    assert evaluate(nn.Linear(3, 2), cross_entropy, loader).num_examples == 19


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.recurrent(x)[0][-1])
        return outputs


def test_counts_and_means_of_sequences_are_those_of_a_loop_by_hand() -> None:
    """Batches of 4, 4 and 1 sequences of 20 steps: 9 examples, and means over them."""
    model = TimeFirst()
    data = [(torch.randn(20, n, 3), torch.randint(2, (n,))) for n in (4, 4, 1)]
    with torch.no_grad():
        scores = torch.cat([model(x) for x, _ in data])
    targets = torch.cat([y for _, y in data])
    found = evaluate(model, cross_entropy, data)
    assert found.num_examples == 9
    assert found.loss == pytest.approx(float(cross_entropy(scores, targets)), rel=1e-5)
    assert found.accuracy == pytest.approx(float((scores.argmax(1) == targets).float().mean()))
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    assert trainer.fit(data, epochs=2).num_examples == trainer.update().num_examples == 9


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def by_hand(model: nn.Module, data: Any, epochs: int = 1) -> list[Tensor]:
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        plain_steps(model, optimizer, data)
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("empty", "cross_entropy"),
    [
        ((torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)), cross_entropy),
        ((torch.ones(4, 3), torch.full((4,), -100)), cross_entropy),
        ((torch.ones(4, 3), torch.full((4,), 255)), nn.CrossEntropyLoss(ignore_index=255)),
        (None, cross_entropy),
        ([], cross_entropy),
    ],
    ids=["no rows", "all ignored", "all of the loss's class", "nothing", "no entries"],
)
def test_batches_without_examples_are_passed_over(empty: Any, cross_entropy: Any) -> None:
    """As samplers give them that draw each example by chance: no loss is a mean over nothing."""
    torch.manual_seed(1)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    filled = [(torch.randn(n, 3), torch.randint(2, (n,))) for n in (4, 2, 3)]
    data = [empty, filled[0], empty, *filled[1:], empty]
    before = evaluate(model, cross_entropy, data)
    assert before == evaluate(model, cross_entropy, filled) and before.num_examples == 9
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    report = trainer.fit(data, epochs=2)
    assert report.steps == report.requested_steps == 6 and trainer.update().num_examples == 9
    for found, expected in zip(model.parameters(), by_hand(other, filled, 2), strict=True):
        torch.testing.assert_close(found.detach(), expected)
    with pytest.raises(TrainingError, match="none with an example"):
        trainer.fit([empty])
    with pytest.raises(TrainingError, match="none with an example"):
        evaluate(model, cross_entropy, [empty])


def test_examples_that_a_loader_does_not_tell_are_those_that_were_met() -> None:
    """A first batch that is larger than the others once stood for all of them."""

    class Uneven:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for n in (8, 2, 1):
                yield torch.randn(n, 3), torch.randint(2, (n,))

    trainer = ElasticTrainer(nn.Linear(3, 2), cross_entropy, sgd, budget=Budget(), policy="full")
    assert trainer.fit(Uneven()).num_examples == 11
    assert trainer.fit(Uneven(), epochs=2).num_examples == 11
    options = TrainerOptions(count_examples=lambda inputs, targets: 2 * len(targets))
    trainer = ElasticTrainer(
        nn.Linear(3, 2), cross_entropy, sgd, budget=Budget(), policy="full", options=options
    )
    assert trainer.fit(Uneven()).num_examples == 22


class Atoms(nn.Module):
    """The energy of molecules of different sizes, each a list entry."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(3, 1)

    def forward(self, molecules: Any, scale: Tensor | None = None) -> Tensor:
        assert scale is None
        return torch.stack([self.energy(torch.as_tensor(each)).sum() for each in molecules])


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("arrays", [False, True])
def test_a_list_of_examples_is_one_argument_however_many_there_are(
    arrays: bool, kind: Any, count: int
) -> None:
    model = Atoms()
    rows = [torch.randn(4 + n, 3) for n in range(count)]
    molecules = kind([each.numpy() for each in rows] if arrays else rows)
    targets = torch.randn(count)
    outputs, loss = outputs_and_loss(model, nn.functional.mse_loss, (molecules, targets))
    expected = torch.stack([model.energy(each).sum() for each in rows])
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(loss, ((expected - targets) ** 2).mean())


class TwoInputs(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one.sum(-1) + 2 * other.sum(-1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_lists_of_what_all_examples_have_are_several_arguments(count: int) -> None:
    """As torch's own collation makes them of pairs of inputs."""
    rows = TensorDataset(torch.randn(count, 3), torch.randn(count, 4), torch.randn(count))
    nested = [((a, b), y) for a, b, y in rows]
    ((inputs, targets),) = DataLoader(nested, batch_size=count)
    assert isinstance(inputs, list)
    outputs, _ = outputs_and_loss(TwoInputs(), nn.functional.mse_loss, (inputs, targets))
    torch.testing.assert_close(outputs, inputs[0].sum(-1) + 2 * inputs[1].sum(-1))


class Words(nn.Module):
    """Scores of texts, or of texts in a list of named entries, by the sum of their letters."""

    def forward(self, texts: Any, prefix: str = "") -> Tensor:
        assert not isinstance(texts, str) and not prefix
        said = [each if isinstance(each, str) else each["text"] for each in texts]
        return torch.tensor([float(sum(map(ord, each))) for each in said])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("named", [False, True])
def test_texts_are_one_argument_however_many_there_are(named: bool, count: int) -> None:
    words = ["ab", "c", "def"][:count]
    texts: list[Any] = [{"text": each, "at": torch.zeros(7)} for each in words] if named else words
    expected = torch.tensor([float(sum(map(ord, each))) for each in words])
    outputs, _ = outputs_and_loss(Words(), nn.functional.mse_loss, (texts, torch.zeros(count)))
    assert torch.equal(outputs, expected)


class Pairs(nn.Module):
    def forward(self, one: Any, other: Any) -> Tensor:
        return torch.tensor([float(a == b) for a, b in zip(one, other, strict=True)])


def test_two_columns_of_texts_are_two_arguments() -> None:
    rows = [(("a", "a"), 1.0), (("b", "c"), 0.0)]
    ((inputs, targets),) = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    outputs, _ = outputs_and_loss(Pairs(), nn.functional.mse_loss, (inputs, targets))
    assert outputs.tolist() == [1.0, 0.0]
