"""Episodes of Meta-Dataset's kind, and the loss by prototypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import DatasetError
from fl_elastic.losses import prototype_logits, prototype_loss
from fl_elastic_simulations.data.episodes import PseudoQueries, augmented, sample_episode


@given(seed=st.integers(0, 10_000), most_support=st.integers(5, 500))
def test_an_episode_keeps_the_rules_of_its_kind(seed: int, most_support: int) -> None:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(20), generator.integers(2, 60, 20))
    episode = sample_episode(labels, generator, most_ways=12, most_support=most_support)
    assert 5 <= episode.ways <= 12
    assert not set(episode.support) & set(episode.query)
    assert len(set(episode.support)) == len(episode.support) <= max(most_support, episode.ways)
    # One class of the dataset per class of the episode, in the support set and in the queries.
    pairs = set(zip(labels[episode.support], episode.support_classes, strict=True))
    pairs |= set(zip(labels[episode.query], episode.query_classes, strict=True))
    assert len(pairs) == episode.ways
    shots = np.bincount(episode.support_classes)
    queries = np.bincount(episode.query_classes)
    assert (shots >= 1).all() and len(set(queries)) == 1
    sizes = np.bincount(labels)[[value for value, _ in sorted(pairs, key=lambda pair: pair[1])]]
    assert queries[0] == max(1, min(10, sizes.min() // 2))
    assert (shots + queries <= sizes).all()


def test_the_same_seed_gives_the_same_episode() -> None:
    labels = np.repeat(np.arange(8), 30)
    one, other = (sample_episode(labels, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(one.support, other.support) and np.array_equal(one.query, other.query)


def test_too_few_classes_are_refused() -> None:
    with pytest.raises(DatasetError, match="there are 4"):
        sample_episode(np.array([0, 0, 1, 1, 2, 2, 3, 3, 4]), np.random.default_rng(0))


def test_prototypes_are_class_means_and_logits_cosines() -> None:
    support = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    logits = prototype_logits(
        torch.tensor([[5.0, 0.0], [1.0, 1.0]]), support, torch.tensor([0, 0, 1])
    )
    torch.testing.assert_close(logits, torch.tensor([[10.0, 0.0], [7.0710678, 7.0710678]]))


def test_the_loss_asks_the_second_half_about_the_first() -> None:
    classes = torch.tensor([0, 1, 1])
    outputs = torch.randn(6, 4, requires_grad=True)
    logits = prototype_logits(outputs[3:], outputs[:3], classes)
    expected = torch.nn.functional.cross_entropy(logits, classes)
    torch.testing.assert_close(prototype_loss(outputs, classes), expected)
    with pytest.raises(ValueError, match="5 outputs for 3 classes"):
        prototype_loss(outputs[:5], classes)


def test_pseudo_queries_are_changed_support_images() -> None:
    support, classes = torch.rand(6, 3, 16, 16), torch.arange(6) % 3
    batches = list(PseudoQueries(support, classes, iterations=4, seed=1))
    assert len(batches) == 4 == len(PseudoQueries(support, classes, 4))
    for inputs, targets in batches:
        assert torch.equal(inputs[:6], support) and torch.equal(targets, classes)
    assert not torch.equal(batches[0][0], batches[1][0])
    again = list(PseudoQueries(support, classes, iterations=4, seed=1))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, again, strict=True))


def test_about_one_batch_in_ten_stays_as_it_is() -> None:
    images = torch.rand(2, 3, 8, 8)
    generator = torch.Generator().manual_seed(0)
    same = sum(torch.equal(augmented(images, generator), images) for _ in range(300))
    assert 12 < same < 55
