"""``fl-elastic plan MODEL --read``: the table of places, with and without data, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import Ended, module_here, result

from fl_elastic import laboratory
from fl_elastic.errors import LaboratoryMissing
from fl_elastic.readout import Place
from fl_elastic.training.sums_size import sums_bytes

MINE = """
import torch
from torch import nn


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def spots():
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 4, (96,), generator=generator)
    images = 0.3 * torch.randn(96, 1, 8, 8, generator=generator)
    for image, label in zip(images, classes.tolist()):
        image[0, 4 * (label // 2) + 1, 4 * (label % 2) + 1] += 4.0
    return list(zip(images.split(16), classes.split(16)))


def once():
    yield []
    yield from spots()


def raises():
    raise OSError("no disk\\nanywhere")


def number():
    return 3


def others():
    return [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))]


def empty():
    return []
"""
SMALL = ("--input", "1,8,8", "--batch-size", "8", "--threads", "1", "--read")

Plan = Callable[..., Ended]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Plan:
    return partial(module_here(tmp_path, monkeypatch, capsys, MINE), "plan")


def test_without_data_it_says_what_places_cost(plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--json"))
    assert set(found) == {"examples", "places", "unions", "best"}
    assert (found["best"], found["unions"]) == (None, [])
    assert {"input@grid4", "in:6@flat", "1@grid2"} <= {each["name"] for each in found["places"]}
    for place in found["places"]:
        assert str(Place.parse(place["name"])) == place["name"]
        assert place["features"] > 0 and place["seconds"] >= 0 and 0 <= place["share"] <= 1
        assert place["sums_bytes"] == sums_bytes(place["features"], 4, examples=100_000)
        assert (place["error"], place["penalty"]) == (None, None)
    at_input = [each["seconds"] for each in found["places"] if each["name"].startswith("input@")]
    last = [each["seconds"] for each in found["places"] if each["name"] == "in:6@flat"]
    assert max(at_input) < last[0]


@pytest.mark.parametrize("data", ["mine:spots", "mine:once"])
def test_with_data_it_says_what_they_are_worth(data: str, plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--data", data, "--json"))
    assert found["examples"] == 96
    errors = {each["name"]: each["error"] for each in found["places"]}
    assert min(errors, key=lambda name: errors[name]) in found["best"]
    # The last layer hardly sees where in the image something is.
    assert errors["in:6@flat"] > 0.4 > 0.2 > min(errors.values())
    assert all(each["penalty"] > 0 for each in found["places"])


def test_own_data_say_their_shape_themselves(plan: Plan) -> None:
    found = result(plan("mine:tiny", "--read", "--data", "mine:spots", "--json"))
    assert found["examples"] == 96 and found["best"]


@pytest.mark.slow
def test_a_data_set_of_the_laboratory_has_a_name(plan: Plan) -> None:
    found = result(plan("digits_cnn", *SMALL, "--data", "digits", "--json"))
    assert found["examples"] == 640 and found["best"]


def test_without_json_it_is_a_table_and_the_best(plan: Plan) -> None:
    ended = plan("mine:tiny", *SMALL, "--data", "mine:spots")
    assert ended.status == 0 and "held-out" in ended.out and "in:6@flat" in ended.out
    assert "best of 96 examples: " in ended.out
    without = plan("mine:tiny", *SMALL)
    assert "held-out" not in without.out and "give --data" in without.out


FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "data without read": (("mine:tiny", "--data", "mine:spots"), "use --data with --read"),
    "unknown model": (("resnet81", *SMALL), "unknown model 'resnet81'"),
    "unknown data set": (("mine:tiny", *SMALL, "--data", "digitz"), "digitz"),
    "no such callable": (("mine:tiny", *SMALL, "--data", "mine:spotz"), "did you mean 'spots'"),
    "data that raise": (("mine:tiny", *SMALL, "--data", "mine:raises"), "OSError: no disk"),
    "data that are none": (("mine:tiny", *SMALL, "--data", "mine:number"), "gives a int"),
    "no batch": (("mine:tiny", *SMALL, "--data", "mine:empty"), "error: "),
    "other inputs": (("mine:tiny", *SMALL, "--data", "mine:others"), "error: "),
    "another shape": (
        ("mine:tiny", "--input", "3,8,8", "--read", "--data", "digits"), "error: ",
    ),
    "other shape of own data": (
        ("mine:tiny", "--input", "1,16,16", "--read", "--data", "mine:spots"),
        "inputs are of shape 1,8,8, not (1, 16, 16)",
    ),
    "no row of numbers": (("torch.nn:Flatten", *SMALL), "error: "),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_with_one_line(name: str, plan: Plan) -> None:
    arguments, hint = FAILURES[name]
    ended = plan(*arguments)
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert hint in ended.err


def test_without_the_laboratory_data_sets_have_no_names(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laboratory, "entry_points", lambda **_: ())
    ended = plan("mine:tiny", *SMALL, "--data", "digits")
    assert ended.is_one_line_of_error() and "dataset batches is part of the laboratory" in ended.err
    with pytest.raises(LaboratoryMissing):
        laboratory.from_laboratory("dataset_batches")
