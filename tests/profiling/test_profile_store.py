"""Cost profiles as files: everything comes back, and every damage is one clear line."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\xff\xfe\x00", b'{"format": "other"}']
)
def test_what_is_no_profile_is_one_line(stored: Path, data: bytes) -> None:
    stored.write_bytes(data)
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


# What the codec of state refuses in any class is tested there.
DAMAGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "groups are empty": (("groups",), []),
    "a shape is negative": (("groups", 0, "shapes", 0), [-3]),
    "fewer shapes than parameters": (("groups", 0, "shapes"), []),
    "fewer copies than parameters": (("groups", 0, "copies"), [1]),
    "a copy is negative": (("groups", 0, "copies"), [1, -1]),
    "a number of statistics is negative": (("groups", 0, "statistics"), -1),
    "a parameter's name is no text": (("groups", 0, "parameters", 0), 7),
    "a kind is unknown": (("groups", 0, "kind"), "magic"),
    "a node's group is out of range": (("nodes", 1, "group"), 3),
    "a node's group is negative": (("nodes", 1, "group"), -1),
    "a group has no node": (("nodes", 1, "group"), None),
    "a node's input is out of range": (("nodes", 0, "inputs"), [99]),
    "a node's input is negative": (("nodes", 1, "inputs"), [-1]),
    "a node's input is itself": (("nodes", 1, "inputs"), [1]),
    "a node's input is above": (("nodes", 2, "inputs"), [0]),
    "an array is short": (("forward_seconds",), [1.0]),
    "an array is nested": (("forward_seconds",), [[1.0], [2.0], [3.0]]),
    "a cost is negative": (("node_path_seconds", 0), -1.0),
    "a cost is NaN": (("node_path_seconds", 0), float("nan")),
    "a cost is beyond floating point": (("node_path_seconds", 0), 10**400),
    "a number is negative": (("fixed_seconds",), -1.0),
    "a number is NaN": (("optimizer_bytes_per_weight",), float("nan")),
    "a number is beyond floating point": (("fixed_seconds",), 10**400),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_content_is_one_line(stored: Path, name: str) -> None:
    (*way, last), value = DAMAGES[name]
    document = place = document_of(stored)
    for step in way:
        place = place[step]
    place[last] = value
    put(stored, document)
    assert "delete it to measure anew" in one_line_error(stored)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


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
