"""Models whose inputs have no row per example, that hold a state or follow themselves, or rename their state."""

from __future__ import annotations

import torch
from odd_models import Kind, batch_of, loss_of, net_of
from subject import BATCHES, Subject
from torch.nn.functional import cross_entropy

from fl_elastic.groups import Batch


def _subject(kind: Kind) -> Subject:
    model = net_of(kind, seed=int(torch.initial_seed() % 1000))
    generator = torch.Generator().manual_seed(3)
    batches: list[Batch] = [batch_of(kind, 4 + n, generator) for n in range(BATCHES)]
    return Subject(model.train(), batches, cross_entropy, loss_of)


def sequences_with_time_first() -> Subject:
    return _subject(Kind("time first"))


def packed_sequences() -> Subject:
    return _subject(Kind("packed"))


def bags_of_words() -> Subject:
    return _subject(Kind("bags"))


def ragged_lists() -> Subject:
    return _subject(Kind("ragged"))


def graphs_as_objects() -> Subject:
    return _subject(Kind("graphs"))


def named_with_edges_first() -> Subject:
    return _subject(Kind("named"))


def checkpoint_wrapper() -> Subject:
    return _subject(Kind(state="checkpointed"))


def renamed_state() -> Subject:
    return _subject(Kind(state="renamed"))


def extra_state() -> Subject:
    return _subject(Kind(state="extra"))


def state_in_an_attribute() -> Subject:
    return _subject(Kind(held="attribute"))


def recurrent_state_in_an_attribute() -> Subject:
    return _subject(Kind("time first", held="attribute"))


def target_that_follows() -> Subject:
    return _subject(Kind(held="target"))
