"""Cost profiles as files: everything comes back, and every damage is one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_archives import crafted
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import ProfileError
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.store import KIND, load_or_measure
from fl_elastic.state.archive import read_archive
from fl_elastic.testing import made_up_profile

ARRAYS = [
    "node_update_seconds",
    "node_path_seconds",
    "optimizer_seconds",
    "forward_seconds",
    "node_saved_bytes",
    "cut_plain_seconds",
    "cut_inference_seconds",
    "node_lean",
]
GRAPH = ["groups", "nodes", "cuts", "blocks", "widths"]


def same(one: CostProfile, other: CostProfile) -> bool:
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)
    return arrays and all(
        getattr(one, name) == getattr(other, name)
        for name in ("key", "graph", "fixed_seconds", "optimizer_bytes_per_weight")
    )


@given(groups=st.integers(1, 12), branched=st.booleans(), seed=st.integers(0, 10**6))
def test_everything_comes_back(
    tmp_path_factory: pytest.TempPathFactory, groups: int, branched: bool, seed: int
) -> None:
    profile = made_up_profile(groups, branched=branched, seed=seed)
    path = save_profile(profile, tmp_path_factory.getbasetemp() / "deep" / "profile.json")
    loaded = load_profile(path, profile.key)
    assert same(loaded, profile)
    assert loaded.full_step_seconds == profile.full_step_seconds


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return save_profile(made_up_profile(groups=3), tmp_path / "profile.json")


def document_of(path: Path) -> dict[str, Any]:
    """Facts of a profile, those of its graph beside the others, and its arrays where a fact says there is one."""
    kept = read_archive(path, KIND)
    arrays = {name: array.tolist() for name, array in kept.arrays.items()}
    return {**kept.facts, **kept.facts["graph"], **arrays}


def put(path: Path, document: dict[str, Any]) -> None:
    """Write facts and arrays, whatever they are; an array that is none becomes a fact."""
    facts, arrays = dict(document), {}
    facts["graph"] = {name: facts.pop(name) for name in GRAPH if name in facts}
    for name in ARRAYS:
        value = facts.get(name)
        try:
            array = np.array(value)
            arrays[name] = array if array.dtype.kind in "biufU" else np.array(value, np.float64)
        except OverflowError:
            arrays[name] = np.full(len(value) if isinstance(value, list) else (), np.inf)
        except (TypeError, ValueError):
            continue
        if name in facts:
            facts[name] = True
    path.write_bytes(crafted(KIND.name, KIND.version, json.dumps(facts).encode(), arrays))


def one_line_error(path: Path, *arguments: Any) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(path, *arguments)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in one_line_error(tmp_path / "none.json")
    assert "directory" in one_line_error(tmp_path)


def test_every_truncation_is_one_line(stored: Path) -> None:
    whole = stored.read_bytes()
    for length in range(0, len(whole), 7):
        stored.write_bytes(whole[:length])
        assert "is damaged" in one_line_error(stored)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        "[" * 100_000,
        b"\xff\xfe\x00",
        '"\ud800"'.encode("utf-8", "surrogatepass"),
    ],
    ids=["empty", "brace", "word", "deep", "not text", "surrogate"],
)
def test_what_is_no_json_is_one_line(stored: Path, text: str | bytes) -> None:
    stored.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "delete it" in one_line_error(stored)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", '{"format": "other"}'])
def test_json_of_something_else_is_no_profile(stored: Path, text: str) -> None:
    stored.write_text(text)
    assert "delete it to measure anew" in one_line_error(stored)


@pytest.mark.parametrize("version", [0, KIND.version + 1, str(KIND.version), None])
def test_another_version_is_named(stored: Path, version: Any) -> None:
    facts = json.dumps(document_of(stored)).encode()
    stored.write_bytes(crafted(KIND.name, version, facts, {}))
    assert f"has version {version!r}, expected {KIND.version}" in one_line_error(stored)


def test_a_profile_of_another_case_says_what_differs(stored: Path) -> None:
    key = replace(made_up_profile().key, threads=8, torch_version="9.9")
    message = one_line_error(stored, key)
    assert "threads 8 against 1" in message and "torch_version" in message


Damage = Callable[[dict[str, Any]], None]


def setting(*path: Any, value: Any) -> Damage:
    def damage(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return damage


def removing(*path: Any) -> Damage:
    def damage(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return damage


DAMAGES: dict[str, Damage] = {
    "no key": removing("key"),
    "no nodes": removing("nodes"),
    "no array": removing("forward_seconds"),
    "no number": removing("fixed_seconds"),
    "key is a list": setting("key", value=[1]),
    "key misses a field": removing("key", "threads"),
    "key has one more": setting("key", "more", value=1),
    "batch shape is a number": setting("key", "batch_shape", value=4),
    "groups are a number": setting("groups", value=3),
    "groups are empty": setting("groups", value=[]),
    "a group is a word": setting("groups", 0, value="x"),
    "a group has no shapes": removing("groups", 0, "shapes"),
    "a shape is a number": setting("groups", 0, "shapes", value=[3]),
    "a shape is infinite": setting("groups", 0, "shapes", value=[[1e999]]),
    "a shape is negative": setting("groups", 0, "shapes", 0, value=[-3]),
    "fewer shapes than parameters": setting("groups", 0, "shapes", value=[]),
    "a kind is unknown": setting("groups", 0, "kind", value="magic"),
    "nodes are null": setting("nodes", value=None),
    "a node is null": setting("nodes", 0, value=None),
    "a node's group is out of range": setting("nodes", 1, "group", value=3),
    "a node's group is negative": setting("nodes", 1, "group", value=-1),
    "a node's group is a fraction": setting("nodes", 1, "group", value=0.5),
    "a node's group is a word": setting("nodes", 1, "group", value="0"),
    "a node's group is true": setting("nodes", 1, "group", value=True),
    "a group has no node": setting("nodes", 1, "group", value=None),
    "a node's input is out of range": setting("nodes", 0, "inputs", value=[99]),
    "a node's input is negative": setting("nodes", 1, "inputs", value=[-1]),
    "a node's input is itself": setting("nodes", 1, "inputs", value=[1]),
    "a node's input is above": setting("nodes", 2, "inputs", value=[0]),
    "a node's inputs are null": setting("nodes", 0, "inputs", value=None),
    "an array is a word": setting("forward_seconds", value="fast"),
    "an array is short": setting("forward_seconds", value=[1.0]),
    "an array is nested": setting("forward_seconds", value=[[1.0], [2.0], [3.0]]),
    "an array is ragged": setting("forward_seconds", value=[[1.0], [2.0, 3.0]]),
    "a cost is negative": setting("node_path_seconds", 0, value=-1.0),
    "a cost is NaN": setting("node_path_seconds", 0, value=float("nan")),
    "a cost is infinite": setting("node_path_seconds", 0, value=float("inf")),
    "a cost is null": setting("node_path_seconds", 0, value=None),
    "a cost is beyond floating point": setting("node_path_seconds", 0, value=10**400),
    "a number is null": setting("fixed_seconds", value=None),
    "a number is negative": setting("fixed_seconds", value=-1.0),
    "a number is NaN": setting("optimizer_bytes_per_weight", value=float("nan")),
    "a number is beyond floating point": setting("fixed_seconds", value=10**400),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_content_is_one_line(stored: Path, name: str) -> None:
    document = document_of(stored)
    DAMAGES[name](document)
    put(stored, document)
    assert "delete it to measure anew" in one_line_error(stored)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", [[], 7, None, {"a": 1}])
def test_a_parameters_name_is_a_text(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "profile.json"
    document = document_of(save_profile(made_up_profile(groups=2), path))
    document["groups"][0]["parameters"][0] = name
    put(path, document)
    with pytest.raises(ProfileError, match="expected str"):
        load_profile(path)


@given(data=st.data(), value=json_values)
def test_any_value_anywhere_is_a_profile_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    document = document_of(save_profile(made_up_profile(groups=2), path))
    place: Any = document
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(
            st.sampled_from(range(len(place)) if isinstance(place, list) else sorted(place))
        )
        if not isinstance(place[step], (dict, list)) or not place[step]:
            break
        last, place = place, place[step]
    else:
        place, step = last, step
    place[step] = value
    put(path, document)
    try:
        loaded = load_profile(path)
    except ProfileError as error:
        assert "\n" not in str(error)
    else:
        assert np.isfinite(loaded.full_step_seconds) and np.isfinite(loaded.path_seconds).all()
        assert mask_bytes(loaded, np.ones(len(loaded), dtype=bool)) >= 0


def test_a_fitting_profile_is_loaded_not_measured(stored: Path) -> None:
    profile = made_up_profile(groups=3)

    def measure() -> CostProfile:
        raise AssertionError("measured although a fitting profile was stored")

    assert same(load_or_measure(stored, profile.key, measure), profile)


@pytest.mark.parametrize("state", ["missing", "stale", "damaged"])
def test_what_does_not_fit_is_measured_again_and_stored(tmp_path: Path, state: str) -> None:
    path = tmp_path / "folder" / "profile.json"
    if state != "missing":
        save_profile(made_up_profile(groups=3), path)
    fresh = made_up_profile(groups=4, seed=1)
    fresh = replace(fresh, key=replace(fresh.key, threads=3))
    if state == "damaged":
        path.write_bytes(path.read_bytes()[:50])
    calls = []

    def measure() -> CostProfile:
        calls.append(1)
        return fresh

    assert same(load_or_measure(path, fresh.key, measure), fresh)
    assert same(load_or_measure(path, fresh.key, measure), fresh)
    assert len(calls) == 1
