"""What a pass tells of the places of a model, and what of it a device can afford."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_elastic import fine_tune
from fl_elastic.budget import Budget
from fl_elastic.closed_form.head_sums_wire import encode_head_sums
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.readout import Readout
from fl_elastic.readout.place import AUTO, Reading, parse_places
from fl_elastic.readout.places_wire import encode_places
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.place_sample import place_sample
from fl_elastic.training.places_reply import places_reply
from fl_elastic.training.read_out import read_out
from fl_elastic.training.sums_size import features_in_memory, held_out, sums_bytes
from fl_elastic.update import Manifest

CLASSES = 5
PLACES = parse_places("input@grid4+1@grid2+3@grid4+in:6@flat")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    ).eval()  # fmt: skip


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 3, 8, 8, generator=generator),
        torch.randint(0, CLASSES, (count,), generator=generator),
    )


def batches(inputs: Tensor, targets: Tensor, ends: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(inputs[i:j], targets[i:j]) for i, j in pairwise([0, *ends])]


def test_rows_are_those_of_the_first_examples_that_have_a_target() -> None:
    model, (inputs, targets) = network(), images(40)
    targets[[0, 7, 30]] = -100
    loader = batches(inputs, targets, [7, 8, 21, 33, 40])
    found = place_sample(model, loader, Reading(PLACES), examples=35, most_features=10**4).sample
    known = torch.arange(35)[targets[:35] >= 0]
    assert list(found.rows) == list(PLACES)
    for place, rows in found.rows.items():
        at: list[Tensor] = []
        alone = Readout(model, (place,), inputs, CLASSES)
        alone.head.register_forward_pre_hook(lambda _, given, at=at: at.append(given[0]))
        with torch.no_grad():
            alone.eval()(inputs)
        np.testing.assert_allclose(rows, at[0][known].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.targets.argmax(axis=1), targets[known].numpy())
    assert found.num_examples == len(known) == len(found.folds)


def test_data_of_which_no_target_counts_are_refused() -> None:
    inputs, targets = images(12)
    loader = batches(inputs, torch.full_like(targets, -100), [12])
    with pytest.raises(TrainingError, match="no target counts"):
        place_sample(network(), loader, Reading(PLACES), examples=12, most_features=99)


@pytest.mark.parametrize("examples", [60, 300, 900])
@pytest.mark.parametrize("uplink", [6e3, 3e4, 1e5])
def test_sums_of_as_many_features_as_are_afforded_fit_the_uplink(
    examples: int, uplink: float
) -> None:
    inputs, targets = images(examples)
    loader = batches(inputs, targets, [examples // 2, examples])
    model = network()
    reply = places_reply(
        model, loader, AUTO, examples=50, of_all=examples, budget=Budget(uplink=uplink),
        names=Manifest.of(model).index,
    )  # fmt: skip
    header = 9000
    assert len(encode_places(reply, Manifest.of(model))) <= uplink + header
    assert min(rows.shape[1] for rows in reply.sample.rows.values()) <= reply.most

    def sent(features: int) -> int:
        head = nn.Linear(features, CLASSES)
        rows = torch.randn(examples, features, generator=torch.Generator().manual_seed(2))
        return len(encode_head_sums(head_sums(head, [(rows, targets)]), Manifest.of(head)))

    assert sent(reply.most) <= uplink < sums_bytes(reply.most + 1, CLASSES, examples)
    # Not far less than there is room for.
    assert sent(reply.most + 1 + reply.most // 10) > uplink - 600


def test_less_memory_means_fewer_features() -> None:
    model, loader = network(), batches(*images(60), [60])
    names = Manifest.of(model).index
    wide, narrow = (
        places_reply(
            model, loader, AUTO, examples=50, of_all=60, budget=Budget(memory=memory), names=names
        )
        for memory in (1e6, 1e5)
    )
    assert narrow.most < wide.most
    # Both say what all places are worth: the features of wide ones can be projected.
    assert list(narrow.sample.rows) == list(wide.sample.rows)


@pytest.mark.parametrize("examples", [1, 40, 319, 320, 321, 500, 1200])
@pytest.mark.parametrize("memory", [2e4, 3e6, 2e7, 9e7])
def test_sums_of_fewer_features_than_fit_the_memory_fit_it_as_well(
    memory: float, examples: int
) -> None:
    """Other clients may afford less, and with fewer features fewer examples are held out."""

    def peak(features: int) -> float:
        if examples <= held_out(features):
            return 40 * examples * features
        return 52 * features**2

    found = features_in_memory(memory, examples)
    assert all(peak(features) <= memory for features in range(1, min(found, 20_000) + 1))
    more = range(found + 1, 20_000)
    assert not more or peak(found + 1) > memory


class Mean(nn.Module):
    """Reads sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.layer = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.words(x))[0].mean(1))
        return scores


def sentences() -> list[tuple[Tensor, Tensor]]:
    """Batches that were padded to their longest sentence each."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for length in (20, 12, 31, 7, 20, 14):
        y = torch.randint(0, 3, (8,), generator=draw)
        found.append((torch.randint(0, 10, (8, length), generator=draw) + 10 * y[:, None], y))
    return found


def test_batches_of_other_lengths_leave_out_the_places_whose_features_they_change() -> None:
    torch.manual_seed(0)
    found = read_out(Mean(), sentences())
    assert found.choice is not None and found.head.error < 0.5
    names = {each.name for each in found.choice.single}
    assert {"words@tokens1", "in:head@flat"} <= names
    assert not any(name.startswith("input") or name == "words@flat" for name in names)
    done = fine_tune(
        Mean(), nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), sentences()
    )
    assert done.final_error < 0.5


def test_a_named_place_that_other_lengths_change_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="different numbers of features in different batches"):
        read_out(Mean(), sentences(), read="words@flat>4")
