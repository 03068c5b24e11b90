"""A model with a frozen base: what travels is what may be trained, and a digest of the rest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adapters import adapted, tokens
from small_models import chain, conv_net
from torch import nn

from fl_elastic import Budget
from fl_elastic.errors import UpdateError
from fl_elastic.training import apply_plan, plan_for
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.frame import peek
from fl_elastic.update.manifest import FROZEN_BASE, Role
from fl_elastic.update.model_wire import decode_weights, encode_weights


def test_the_manifest_holds_the_adapters_alone() -> None:
    model = adapted()
    manifest = Manifest.of(model)
    assert list(manifest.names) == [
        name for name, each in model.named_parameters() if each.requires_grad
    ]
    assert set(manifest.roles) == {Role.PARAMETER}
    whole = Manifest.of(model, whole=True)
    assert list(whole.names) == list(model.state_dict())
    assert manifest.hash != whole.hash


@pytest.mark.parametrize(("build", "known"), [(chain, "CHAIN"), (conv_net, "CONV")])
def test_a_model_of_which_everything_is_trained_is_what_it_was(
    build: Callable[[], nn.Module], known: str
) -> None:
    """Its hash is on the wire between releases, and its messages have no digest."""
    model = build()
    manifest = Manifest.of(model)
    assert manifest.hash == {"CHAIN": "96fb55acc26a482e", "CONV": "fd50206457eec9f5"}[known]
    assert manifest == Manifest.of(model, whole=True) == manifest.with_base(model)
    weights = weights_of(model, manifest)
    assert FROZEN_BASE not in weights
    assert set(peek(encode_weights(weights, manifest))) == {"manifest", "codec", "version"}


def test_a_model_of_which_nothing_is_trained_is_listed_whole() -> None:
    model = conv_net().requires_grad_(False)
    assert list(Manifest.of(model).names) == list(model.state_dict())


class Odd(nn.Module):
    """One trained layer beside buffers of all kinds."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.last = nn.Linear(4, 2)


class Quantised(nn.Module):
    """Weights as integers, with their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 4, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(4))
        self.norm = nn.Linear(1, 1).requires_grad_(False)


class Moving(nn.Module):
    """A mean that follows what it sees, with its counter and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("private", torch.zeros(3), persistent=False)


def norm(*, affine: bool, frozen: bool) -> nn.Module:
    found = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4, affine=affine))
    found[1].requires_grad_(not frozen)
    return found


STATISTICS = ["first.1.running_mean", "first.1.running_var", "first.1.num_batches_tracked"]


@pytest.mark.parametrize(
    ("first", "moving"),
    [
        (norm(affine=True, frozen=True), []),
        (norm(affine=True, frozen=False), ["first.1.weight", "first.1.bias", *STATISTICS]),
        (norm(affine=False, frozen=True), STATISTICS),
        (Quantised(), []),
        (Moving(), ["first.mean", "first.seen"]),
    ],
    ids=["frozen norm", "trained norm", "norm without parameters", "quantised", "moving mean"],
)
def test_buffers_travel_if_training_changes_them(first: nn.Module, moving: list[str]) -> None:
    assert list(Manifest.of(Odd(first)).names) == [*moving, "last.weight", "last.bias"]


def test_parameters_of_integers_belong_to_the_base() -> None:
    model = adapted()
    model.packed = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    assert "packed" not in Manifest.of(model).names
    only = nn.Linear(2, 2)
    only.packed = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    assert "packed" in Manifest.of(only).names


def test_the_manifest_does_not_depend_on_a_moment_of_training() -> None:
    """A plan freezes all but the last adapter; what the owner has set is what counts."""
    model, batches = adapted(), tokens(1)
    ordinary = chain()
    before, others = Manifest.of(model), Manifest.of(ordinary)
    plan = plan_for(model, nn.functional.cross_entropy, batches, budget=Budget(), policy="head")
    inputs = [(torch.randn(4, *ordinary[0].weight.shape[1:]), torch.tensor([0, 1, 0, 1]))] * 2
    head = plan_for(ordinary, nn.functional.cross_entropy, inputs, budget=Budget(), policy="head")
    assert len(plan.trained_parameters) < len(before)
    with apply_plan(model, plan), apply_plan(ordinary, head):
        assert sum(each.requires_grad for each in model.parameters()) < len(before)
        assert Manifest.of(model) == before and Manifest.of(ordinary) == others
        # A plan within a plan, as for a probe.
        with apply_plan(model, plan):
            pass
        assert Manifest.of(model) == before
    assert Manifest.of(model) == before
    model.blocks[0].lora_A.requires_grad_(False)
    assert len(Manifest.of(model)) == len(before) - 1


def test_weights_carry_the_digest_of_the_base_and_are_refused_by_another() -> None:
    model, manifest = adapted(), Manifest.of(adapted())
    weights = weights_of(model, manifest)
    assert list(weights) == [*manifest.names, FROZEN_BASE]
    same, other = adapted(), adapted()
    with torch.no_grad():
        same.blocks[1].lora_B.weight += 1
        other.blocks[1].base.weight[0, 0] += 1e-6
    load_weights(same, manifest, weights)
    assert torch.equal(same.blocks[1].lora_B.weight, model.blocks[1].lora_B.weight)
    with pytest.raises(
        UpdateError, match=r"frozen base of the model differs: its digest is \w{12} there"
    ):
        load_weights(other, manifest, weights)
    load_weights(other, manifest, {name: weights[name] for name in manifest.names})
    # Some of them are for a change, not for a model.
    assert list(weights_of(model, manifest, manifest.names[:1])) == [manifest.names[0]]


@pytest.mark.parametrize("change", ["value", "dtype", "name", "buffer"])
def test_the_digest_knows_all_of_the_base(change: str) -> None:
    model, other = adapted(), adapted()
    known = Manifest.of(model).with_base(model).base
    assert known and Manifest.of(other).with_base(other).base == known
    if change == "value":
        with torch.no_grad():
            other.head.bias[0] += 1
    elif change == "dtype":
        other.head.to(torch.float64)
    elif change == "name":
        other.embedding = other.embed
        del other.embed
    else:
        other.register_buffer("table", torch.arange(3))
    assert Manifest.of(other).with_base(other).base != known


def test_a_server_that_knows_arrays_has_the_manifest_and_its_messages_say_the_base() -> None:
    model = adapted()
    mine = Manifest.of(model).with_base(model)
    weights = weights_of(model, mine)
    server = Manifest.of_arrays(weights)
    assert server.hash == mine.hash and server.names == mine.names and server.base == mine.base
    packed = encode_weights(weights, server, version=2)
    found, version = decode_weights(packed, mine)
    assert version == 2 and list(found) == list(mine.names)
    other = adapted(seed=6)
    theirs = Manifest.of(other).with_base(other)
    changed = encode_weights(weights, server, version=2, since=1, names=mine.names[:1])
    for message in (packed, changed):
        with pytest.raises(UpdateError, match="frozen base of the model differs"):
            decode_weights(message, theirs, (weights, 1))
    # Who has not said what its base is, is not compared.
    bare = encode_weights(weights, Manifest.of(model), version=2)
    assert len(bare) < len(packed) <= len(bare) + 64
    decode_weights(bare, theirs)


@pytest.mark.parametrize(
    "digest", [np.zeros(3, np.uint8), np.zeros(16), np.zeros((4, 4), np.uint8)]
)
def test_what_is_no_digest_is_said(digest: np.ndarray) -> None:
    with pytest.raises(UpdateError, match="expected 16 bytes"):
        Manifest.of_arrays({"w": np.zeros(2, np.float32), FROZEN_BASE: digest})


def test_a_base_without_values_is_said() -> None:
    model = adapted()
    model.head.to("meta")
    with pytest.raises(UpdateError, match=r"'head.weight' is on the meta device"):
        Manifest.of(model).with_base(model)


def test_the_manifest_that_fits_names() -> None:
    model = adapted()
    assert Manifest.fitting(model, list(model.state_dict())) == Manifest.of(model, whole=True)
    assert Manifest.fitting(model, Manifest.of(model).names) == Manifest.of(model)
    assert Manifest.fitting(chain(), []) == Manifest.of(chain())


@pytest.mark.parametrize("data", [b"", b"FLEL", b"\xff" * 80, b"FLEL" + b"\xff" * 60])
def test_a_header_that_cannot_be_read_says_nothing(data: bytes) -> None:
    assert peek(data) == {}
