"""Every pooling that is registered, and one of a stranger's package, keep to what a head relies on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from fl_elastic import registry
from fl_elastic.errors import PlanError
from fl_elastic.readout.place import Place
from fl_elastic.readout.poolings import POOLINGS, pooling_for
from fl_elastic.readout.readout_module import Readout
from fl_elastic.testing import Check, name_of, pooling_checks

STRANGER = '''
from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.readout.poolings import POOLINGS


@POOLINGS.register("largest")
class Largest(nn.Module):
    """The largest value of each channel of a map."""

    def __init__(self, shape, size):
        super().__init__()
        if len(shape) != 3 or size:
            raise PlanError(f"the largest values need (C, H, W) and no size, the place has {shape}")

    def forward(self, given):
        return given.amax(dim=(2, 3))
'''


NAMES = POOLINGS.names()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pooling in a package of its own, found by its entry point."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "a_strangers_pooling.py").write_text(STRANGER)
    entry = EntryPoint("largest", "a_strangers_pooling", "fl_elastic.poolings")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))

        def found(**wanted: Any) -> EntryPoints:
            return EntryPoints([entry]).select(**wanted)

        patch.setattr(registry, "entry_points", found)
        yield "largest"
        del POOLINGS._entries["largest"]
        sys.modules.pop("a_strangers_pooling", None)


@pytest.mark.parametrize("check", pooling_checks(), ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_pooling(name: str, check: Check) -> None:
    check(POOLINGS.get(name))


@pytest.mark.parametrize("check", pooling_checks(), ids=name_of)
def test_that_of_a_stranger(check: Check, stranger: str) -> None:
    check(POOLINGS.get(stranger))


def test_a_stranger_can_be_read_by_name(stranger: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    images = torch.randn(3, 1, 8, 8)
    readout = Readout(model, f"1@{stranger}", images, 2)
    assert readout.head.in_features == 4
    assert stranger in POOLINGS.names()


def test_each_check_has_a_name_of_its_own() -> None:
    assert len({name_of(check) for check in pooling_checks()}) == len(pooling_checks()) == 10


class Broken(nn.Module):
    """A pooling of maps that keeps to everything, as the wrong ones below do not."""

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if len(shape) != 3 or size:
            raise PlanError("maps only")

    def forward(self, given: Tensor) -> Tensor:
        return given.mean(dim=(2, 3))


class NoRows(Broken):
    def forward(self, given: Tensor) -> Tensor:
        return given.flatten(2)


class OfTheBatch(Broken):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given - given.mean(dim=0))


class ByChance(Broken):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) + torch.randn(())


class Trained(Broken):
    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__(shape, size)
        self.scale = nn.Parameter(torch.ones(()))


class Kept(Broken):
    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__(shape, size)
        self.register_buffer("scale", torch.ones(()))


class InSingle(Broken):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given.float())


class InPlace(Broken):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given.data.mul_(2))


class OtherError(Broken):
    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        if len(shape) != 3:
            raise ValueError("maps only")
        super().__init__(shape, size)


class NotCopied(Broken):
    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__(shape, size)
        self.left = (each for each in range(3))


class NothingSuits(Broken):
    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        raise PlanError("never")


WRONG = {
    NoRows: "check_each_example_has_a_row_of_numbers",
    OfTheBatch: "check_a_row_depends_on_its_example_alone",
    ByChance: "check_equal_arguments_give_equal_rows",
    Trained: "check_nothing_is_trained_or_kept_in_a_state",
    Kept: "check_nothing_is_trained_or_kept_in_a_state",
    InSingle: "check_type_and_device_are_the_inputs",
    InPlace: "check_inputs_stay_and_gradients_flow",
    OtherError: "check_what_does_not_suit_is_a_plan_error",
    NotCopied: "check_copies_give_the_same",
    NothingSuits: "check_some_shape_suits",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_found(kind: Any) -> None:
    by_name = {name_of(check): check for check in pooling_checks()}
    for check in pooling_checks():
        check(Broken)
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        by_name[WRONG[kind]](kind)


def test_grids_are_means_of_cells() -> None:
    maps = torch.randn(3, 4, 8, 12)
    found = pooling_for(Place("x", "grid", 2), maps)(maps)
    slow = torch.stack([
        maps[:, :, 4 * row : 4 * row + 4, 6 * column : 6 * column + 6].mean(dim=(2, 3))
        for row in range(2)
        for column in range(2)
    ], dim=2).flatten(1)  # fmt: skip
    torch.testing.assert_close(found, slow)
    clips = torch.randn(2, 3, 4, 6, 8)
    found = pooling_for(Place("x", "grid", 2), clips)(clips).reshape(2, 3, 2, 2, 2)
    slow = clips.reshape(2, 3, 2, 2, 2, 3, 2, 4).mean(dim=(3, 5, 7))
    torch.testing.assert_close(found, slow)


@pytest.mark.parametrize("before", [0, 1])
def test_tokens_are_pooled_as_the_map_that_they_come_from(before: int) -> None:
    maps = torch.randn(3, 5, 6, 6)
    tokens = torch.cat([torch.full((3, before, 5), 99.0), maps.flatten(2).movedim(1, 2)], dim=1)
    for size in (1, 2, 3):
        found = pooling_for(Place("x", "tokens", size), tokens)(tokens)
        torch.testing.assert_close(found, adaptive_avg_pool2d(maps, size).flatten(1))


@pytest.mark.parametrize("first", [12, 16, 17])
def test_of_texts_the_first_batch_says_how_tokens_are_pooled(first: int) -> None:
    pooling = pooling_for(Place("x", "tokens", 2), torch.randn(3, first, 5))
    found = {tokens: pooling(torch.randn(3, tokens, 5)).shape for tokens in (12, 16, 17, 20)}
    assert set(found.values()) == {(3, 10 if first == 12 else 20)}
    texts = torch.randn(3, 16, 5)
    if first == 12:
        halves = texts.reshape(3, 2, 8, 5).mean(dim=2)
        torch.testing.assert_close(pooling(texts), halves.movedim(1, 2).flatten(1))


def test_the_pages_name_every_pooling() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "where-to-read.md"
    assert [name for name in NAMES if not re.search(rf"`{name}", page.read_text())] == []
