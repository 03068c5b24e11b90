"""Loaders of every kind: lists, data loaders, streams, and those that give nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, cast

import numpy as np
import pytest
import torch
from plain_loop import plain_steps
from small_models import (
    Batch,
    Reiterable,
    chain,
    loss_fn,
    same_weights,
    sgd,
    trainer_of,
    vectors,
    weights_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training import ElasticTrainer
from fl_elastic.training.batches import Epochs
from fl_elastic.training.evaluate import evaluate
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.loader import LoaderSize, first_batches, loader_size, within


def loaders() -> dict[str, Callable[[list[Batch]], Iterable[Batch]]]:
    def stacked(batches: list[Batch]) -> TensorDataset:
        return TensorDataset(
            torch.cat([inputs for inputs, _ in batches]), torch.cat([t for _, t in batches])
        )

    class Stream(IterableDataset[Batch]):
        def __init__(self, dataset: TensorDataset) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[Any]:
            return iter([self.dataset[index] for index in range(len(self.dataset))])

    class Sized(Reiterable):
        def __len__(self) -> int:
            return len(self.batches)

    return {
        "list": lambda batches: batches,
        "tuple": tuple,
        "re-iterable without length": Reiterable,
        "re-iterable with length": Sized,
        "data loader": lambda batches: DataLoader(stacked(batches), batch_size=8),
        "data loader of a stream": lambda batches: DataLoader(
            Stream(stacked(batches)), batch_size=8
        ),
    }


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("last", [8, 3], ids=["even", "smaller last batch"])
def test_loaders_of_every_kind_train_alike(kind: str, last: int) -> None:
    batches = [*vectors(3), vectors(1, size=last, seed=9)[0]]
    model = chain()
    plain = deepcopy(model)
    report = trainer_of(model, batches[0], ["6", "2"]).fit(loaders()[kind](batches), epochs=2)
    trainer_of(plain, batches[0], ["6", "2"]).fit(batches, epochs=2)
    assert report.steps == report.requested_steps == 8
    assert same_weights(weights_of(plain), model)
    if kind != "re-iterable with length":
        assert report.num_examples == 24 + last


class Refilled(Reiterable):
    """Fills the same memory with each batch, as loaders do that allocate nothing while they run."""

    def __iter__(self) -> Iterator[Batch]:
        memory = tuple(map(torch.empty_like, self.batches[0]))
        for batch in self.batches:
            for place, given in zip(memory, batch, strict=True):
                place.copy_(given)
            yield memory


def collating_into_the_same_memory(batches: list[Batch]) -> DataLoader[Any]:
    """A DataLoader whose own collating function fills the same memory with each batch."""
    memory = tuple(map(torch.empty_like, batches[0]))

    def collate(examples: list[Any]) -> Batch:
        for place, given in zip(memory, zip(*examples, strict=True), strict=True):
            place.copy_(torch.stack(given))
        return memory

    data = TensorDataset(*map(torch.cat, zip(*batches, strict=True)))
    return DataLoader(data, batch_size=len(memory[0]), collate_fn=collate)


@pytest.mark.parametrize("refilled", [Refilled, collating_into_the_same_memory])
def test_a_loader_may_fill_the_same_memory_again(refilled: Callable[[list[Batch]], Any]) -> None:
    def trained(loader: Iterable[Batch]) -> nn.Module:
        torch.manual_seed(0)
        model = chain()
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(loader)
        return model

    batches = vectors(4)
    assert same_weights(weights_of(trained(refilled(batches))), trained(batches))
    head = nn.Linear(6, 3)
    found, known = (head_sums(head, each) for each in (refilled(batches), batches))
    assert np.array_equal(found.products, known.products)


def test_a_loss_may_write_into_targets_that_an_estimate_has_used_before() -> None:
    def of_classes_from_one(out: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(out, targets.sub_(1))

    torch.manual_seed(0)
    model, batches = chain(), vectors(3)
    plain = deepcopy(model)
    plain_steps(plain, sgd(plain.parameters()), batches)
    given = [(inputs, targets + 1) for inputs, targets in batches]
    ElasticTrainer(model, of_classes_from_one, sgd, budget=Budget()).fit(given, epochs=1)
    assert same_weights(weights_of(plain), model)


class Shuffled(IterableDataset[Any]):
    """Gives examples in a random order, with random noise, and does not say how many there are."""

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = (torch.cat(each) for each in zip(*vectors(3), strict=True))
        for place in torch.randperm(len(targets)).tolist():
            yield inputs[place] + 0.1 * torch.randn(inputs.shape[1]), targets[place]


@pytest.mark.parametrize("budget", [Budget(), Budget(deadline=600.0)])
def test_counting_a_loader_takes_no_random_numbers_from_the_steps(budget: Budget) -> None:
    loader, model = DataLoader(Shuffled(), batch_size=5), chain()
    plain = deepcopy(model)
    torch.manual_seed(2)
    ElasticTrainer(model, loss_fn, sgd, budget=budget, policy="full").fit(loader, epochs=2)
    torch.manual_seed(2)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        plain_steps(plain, optimizer, loader)
    assert same_weights(dict(plain.state_dict()), model)


def test_a_loader_may_say_itself_how_many_examples_it_has() -> None:
    class Knowing(Reiterable):
        dataset_size = 17

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Batch]:
            raise AssertionError("read although it says its size")

    assert loader_size(Knowing([]), vectors()[0]) == LoaderSize(2, 17)


def test_first_batches_reads_no_further() -> None:
    read = []

    class Watching(Reiterable):
        def __iter__(self) -> Iterator[Batch]:
            for index, batch in enumerate(self.batches):
                read.append(index)
                yield batch

    assert len(first_batches(Watching(vectors(5)), 2, "cpu")) == 2
    assert read == [0, 1]
    assert len(first_batches(vectors(1), 2, "cpu")) == 1


class NoExamples(Dataset[Any]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


@pytest.mark.parametrize(
    "empty",
    [[], Reiterable([]), DataLoader(NoExamples(), batch_size=2)],
    ids=["list", "none", "torch"],
)
def test_an_empty_loader_is_one_line(empty: Any) -> None:
    with pytest.raises(TrainingError, match="the loader gave no batch") as caught:
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget()).fit(empty)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_loader_that_can_be_read_only_once_is_one_line(count: int) -> None:
    model = chain()
    before = Snapshot(model)
    with pytest.raises(TrainingError, match="can be read only once") as caught:
        ElasticTrainer(model, loss_fn, sgd, budget=Budget(speedup=1.2)).fit(iter(vectors(count)))
    assert "\n" not in str(caught.value) and before.differences() == []


def test_a_dataset_in_the_place_of_a_loader_is_refused() -> None:
    """Its examples have the form of batches: as many examples would be told as an example has numbers."""
    (inputs, targets), *_ = vectors(1)
    model = chain()
    with pytest.raises(TrainingError, match=r"TensorDataset.*DataLoader\(dataset, batch_size="):
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(TensorDataset(inputs, targets))
    with pytest.raises(TrainingError, match=r"TensorDataset.*DataLoader\(dataset, batch_size="):
        evaluate(model, loss_fn, TensorDataset(inputs, targets))


def test_examples_of_several_inputs_and_outputs_are_those_of_each() -> None:
    """Two inputs and two targets are not two examples."""
    batch = ((torch.zeros(8, 3), torch.zeros(8, 4)), (torch.zeros(8), torch.zeros(8, 2)))
    assert loader_size([batch] * 3, batch) == LoaderSize(3, 24)
    one: Any = ([torch.zeros(3, 9, 9)], [torch.zeros(9, 9)])
    assert loader_size([one] * 3, one) == LoaderSize(3, 3)
    with pytest.raises(TrainingError, match="the loader is None"):
        first_batches(cast(Any, None), 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("seconds", "given"), [(0.0, 1), (35.0, 3), (30.0, 3), (29.0, 2), (95.0, 9), (1e9, 12)]
)
def test_no_batch_is_begun_that_there_is_no_time_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float, given: int
) -> None:
    """Reading takes 6 seconds and the work on a batch 4."""
    now = [100.0]
    monkeypatch.setattr("fl_elastic.training.loader.time.monotonic", lambda: now[0])

    def loader() -> Iterator[int]:
        for index in range(12):
            now[0] += 6.0
            yield index

    done = []
    for batch in within(loader(), seconds):
        now[0] += 4.0
        done.append(batch)
    assert done == list(range(given)) and (now[0] <= 100 + seconds or given == 1)


@pytest.mark.parametrize("said", [2, 3])
def test_a_loader_that_says_too_few_batches_is_told_what_is_left_out(
    said: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Saying(Reiterable):
        def __len__(self) -> int:
            return said

    report = trainer_of(chain(), vectors(3)[0], ["6"]).fit(Saying(vectors(3)))
    assert report.steps == said
    assert ("gives more" in caplog.text) is (said < 3)


def test_a_length_that_is_not_implemented_is_none() -> None:
    class Unsized(Reiterable):
        def __len__(self) -> int:
            raise NotImplementedError

    batches, model = vectors(3), chain()
    plain = deepcopy(model)
    assert trainer_of(model, batches[0], ["6"]).fit(Unsized(batches)).steps == 3
    trainer_of(plain, batches[0], ["6"]).fit(batches)
    assert same_weights(weights_of(plain), model)


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("ignored", [-100, 2])
def test_a_fit_counts_the_examples_that_an_evaluation_counts(kind: str, ignored: int) -> None:
    """An example whose class the loss ignores changes no gradient, so it gives its client no weight."""
    batches = [(x, torch.where(torch.arange(len(y)) < n, y % 2, ignored)) for n, (x, y) in
               enumerate(vectors(4), start=1)]  # fmt: skip
    judged = nn.CrossEntropyLoss(ignore_index=ignored)
    trainer = ElasticTrainer(chain(), judged, sgd, budget=Budget())
    loader = loaders()[kind](batches)
    assert trainer.fit(loader).num_examples == 1 + 2 + 3 + 4
    assert trainer.update().num_examples == 10
    assert evaluate(trainer.model, judged, loader).num_examples == 10


def test_of_a_pass_that_is_cut_short_as_large_a_share_counts() -> None:
    data = TensorDataset(torch.randn(64, 6), torch.tensor([0, -100] * 32))
    passes = Epochs(DataLoader(data, batch_size=8), 1, "cpu")
    passes.first(3)
    assert (passes.first_pass, passes.examples(LoaderSize(8, 64))) == (12, 32)


class Once:
    """Gives its batches to the first reader alone, without saying how many."""

    def __init__(self) -> None:
        self.left = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(3)]

    def __iter__(self) -> Iterator[Any]:
        left, self.left = self.left, []
        return iter(left)


def test_a_loader_that_is_empty_when_it_is_counted_is_refused() -> None:
    model = nn.Linear(3, 2)
    trainer = ElasticTrainer(
        model,
        nn.functional.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1),
        budget=Budget(deadline=1.0),
    )
    with pytest.raises(TrainingError, match="no batch when it was read again"):
        trainer.fit(Once())


@pytest.mark.parametrize(
    ("sizes", "memory", "said"),
    [([4, 4, 2, 4], 1e9, 0), ([4, 9, 2, 9], 1e9, 1), ([4, 9], None, 0)],
)
def test_a_batch_that_is_larger_than_the_one_whose_memory_is_known_is_said_once(
    sizes: list[int], memory: float | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = [vectors(size=size)[0] for size in sizes]
    ElasticTrainer(
        chain(), loss_fn, sgd, budget=Budget(memory=memory), policy="full"
    ).fit(data)  # fmt: skip
    assert caplog.text.count("is larger than the first one, of shape (4, 6)") == said
