"""Examples by how often they are forgotten, against histories written out."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import chain, loss_fn, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.methods.tokens.active_examples import ActiveExamples, ForgettingCounts, swapped
from fl_elastic.training import ElasticTrainer

histories = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60)


@given(histories)
def test_counts_are_those_of_each_examples_own_history(shown: list[tuple[int, bool]]) -> None:
    counts = ForgettingCounts(6)
    for start in range(0, len(shown), 7):
        part = shown[start : start + 7]
        counts.note([example for example, _ in part], [right for _, right in part])
    for example in range(6):
        history = [right for each, right in shown if each == example]
        events = sum(a and not b for a, b in itertools.pairwise(history))
        assert counts.events[example] == events
        assert counts.never_right[example] == (not any(history))
    counts.clear()
    assert not counts.events.any() and counts.never_right.all()


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 12), st.integers(0, 99))
def test_swapping_takes_the_least_forgotten_out(
    active: int, aside: int, count: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    counts, total = ForgettingCounts(active + aside), active + aside
    for _ in range(6):
        shown = generator.permutation(total)[: total // 2 + 1]
        counts.note(shown, generator.random(len(shown)) < 0.6)
    order = generator.permutation(total)
    used, pool = order[:active], order[active:]
    now, rest = swapped(used, pool, counts, count, np.random.default_rng(seed))
    moved = min(count, active, aside)
    assert sorted([*now, *rest]) == list(range(total)) and len(now) == active

    def worth(example: int) -> float:
        return np.inf if counts.never_right[example] else float(counts.events[example])

    # Python's sort is stable as well.
    going = sorted(used.tolist(), key=worth)[:moved]
    assert rest[len(rest) - moved :].tolist() == going
    assert now[: active - moved].tolist() == [each for each in used.tolist() if each not in going]
    assert set(now[active - moved :]) <= set(pool)


def test_the_published_swap_is_a_sixteenth_of_what_is_active() -> None:
    sampler = ActiveExamples(1_281_167, batch_size=2048)
    assert (len(sampler.aside), len(sampler.active)) == (256_233, 1_024_934)
    assert sampler._swap == 64_058


class Judge:
    """Is right where it is told to be."""

    def __init__(self, sampler: ActiveExamples) -> None:
        self.sampler = sampler

    def run(self, passes: int, forgotten: set[int]) -> list[set[int]]:
        active = []
        for number in range(passes):
            for batch in self.sampler:
                right = [not (each in forgotten and number % 2) for each in batch]
                self.sampler.judge(torch.tensor(right))
            active.append({*self.sampler.active.tolist()})
        return active


def test_swaps_come_after_so_many_passes_and_only_so_often() -> None:
    sampler = ActiveExamples(40, batch_size=6, aside=0.25, swap=0.1, every=2, swaps=3, seed=1)
    kept = {*sampler.active[:20].tolist()}
    active = Judge(sampler).run(12, kept)
    changes = [len(now - before) for before, now in itertools.pairwise(active)]
    assert changes == [0, 4, 0, 4, 0, 4, 0, 0, 0, 0, 0]
    assert all(len(each) == 30 for each in active)
    # Those that are forgotten in every second pass stay.
    assert kept <= active[2] and kept <= active[-1]


def test_the_trainer_tells_what_it_gets_right_in_the_order_of_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=generator)
    targets = torch.randint(3, (24,), generator=generator)
    sampler = ActiveExamples(24, batch_size=4, every=1, swap=0.1, swaps=2, seed=3)
    slow, told = ForgettingCounts(24), []
    model = chain()
    place = {tuple(row.tolist()): index for index, row in enumerate(inputs)}

    def watch(module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled() and len(given[0]) == 4:
            ids = [place[tuple(row.tolist())] for row in given[0]]
            told.append((ids, (out.argmax(1) == targets[torch.tensor(ids)]).tolist()))

    noted: list[tuple[list[int], list[bool]]] = []
    note = sampler.counts.note
    sampler.counts.note = lambda ids, right: (  # type: ignore[method-assign]
        noted.append(([*ids], right.tolist())), note(ids, right),  # type: ignore[union-attr]
    )[1]  # fmt: skip
    loader = DataLoader(TensorDataset(inputs, targets), batch_sampler=sampler)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    handle = model.register_forward_hook(watch)
    report = trainer.fit(loader, epochs=3)
    handle.remove()
    assert report.steps == 15 and report.num_examples == 19
    assert [each for each in noted if len(each[0]) == 4] == [each for each in told if each in noted]
    assert len(noted) == 15 and sum(len(ids) for ids, _ in noted) == 3 * 19
    for ids, right in noted:
        slow.note(ids, right)
    assert len({*range(24)} - {each for ids, _ in noted for each in ids}) < 5


def test_batches_that_workers_prepare_ahead_are_judged_in_their_order() -> None:
    inputs = torch.arange(24.0)[:, None]
    # Right on the first half of the examples in every second pass, and never on the others.
    sampler = ActiveExamples(24, batch_size=4, seed=3)
    loader = DataLoader(TensorDataset(inputs, inputs), batch_sampler=sampler, num_workers=2)
    for number in range(4):
        for shown, _ in loader:
            sampler.judge((shown[:, 0] < 12) & (number % 2 == 0))
    active = sampler.active
    assert sampler.counts.events[active].tolist() == [2 * (each < 12) for each in active.tolist()]
    assert sampler.counts.never_right[active].tolist() == (active >= 12).tolist()


def test_models_without_class_scores_are_refused_and_left_alone() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    data = TensorDataset(torch.randn(10, 2), torch.randn(10, 1))
    loader = DataLoader(data, batch_sampler=ActiveExamples(10, 2))
    trainer = ElasticTrainer(model, nn.functional.mse_loss, sgd, budget=Budget(), policy="full")
    with pytest.raises(TrainingError, match="class scores"):
        trainer.fit(loader)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("wrong", [
    {"aside": 0.0}, {"aside": 1.0}, {"swap": 0.0}, {"every": 0}, {"batch_size": 0}, {"aside": 0.01},
])  # fmt: skip
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TrainingError):
        ActiveExamples(**{"examples": 10, "batch_size": 2} | wrong)  # type: ignore[arg-type]


def test_judging_what_was_not_drawn_is_refused() -> None:
    sampler = ActiveExamples(10, 2)
    with pytest.raises(TrainingError, match="drew 0"):
        sampler.judge(torch.ones(2))
    next(iter(sampler))
    with pytest.raises(TrainingError, match="drew 2"):
        sampler.judge(torch.ones(3))


def judged_pass(sampler: ActiveExamples, right: Callable[[int], bool]) -> set[int]:
    """Draw and judge a whole pass; return what was drawn."""
    drawn = set()
    for batch in sampler:
        sampler.judge(torch.tensor([right(example) for example in batch]))
        drawn |= set(batch)
    return drawn


@pytest.mark.parametrize("examples", [3, 5, 9, 10])
def test_of_few_examples_one_is_swapped(examples: int) -> None:
    sampler = ActiveExamples(examples, 2, every=1, swaps=2 * examples, seed=0)
    seen = set[int]()
    for _ in range(2 * examples + 1):
        before = set(sampler.active.tolist())
        drawn = judged_pass(sampler, lambda example: True)
        assert len(drawn) == len(before) and len(drawn - before) <= 1
        seen |= drawn
    assert seen == set(range(examples))


def test_on_a_stream_examples_come_and_go() -> None:
    sampler = ActiveExamples(10, 4, aside=0.2, swap=0.1, every=1, swaps=None, seed=0)
    judged_pass(sampler, lambda example: True)
    for there in range(11, 31):
        sampler.grow(there)
        assert len(sampler.aside) == round(0.2 * there)
    everything = set(range(30))
    assert set(sampler.active.tolist()) | set(sampler.aside.tolist()) == everything
    sampler.leave(range(10))
    for _ in range(40):
        drawn = judged_pass(sampler, lambda example: example % 2 == 0)
        assert drawn <= everything - set(range(10))
        # What is never right is what the model forgets most: it is in use and stays.
    odd = {example for example in range(10, 30) if example % 2}
    assert odd <= set(sampler.active.tolist())
    with pytest.raises(TrainingError, match="had 30 examples and cannot have 29"):
        sampler.grow(29)
    before = sampler.active.tolist()
    with pytest.raises(TrainingError, match="no example would be left"):
        sampler.leave(before)
    assert sampler.active.tolist() == before
