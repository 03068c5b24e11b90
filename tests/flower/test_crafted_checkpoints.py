"""A checkpoint that somebody wrote by hand is one clear error, and sets nothing that a strategy does not keep."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_archives import crafted
from flwr.serverapp.strategy import FedAdam
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import assert_identical, quiet, run, scripted_app

from fl_elastic.aggregation import SERVER_OPTIMIZERS, ModelAverage
from fl_elastic.errors import CheckpointError, ElasticError
from fl_elastic.flower import (
    Checkpointed,
    PartialUpdates,
    RoundConfig,
    load_checkpoint,
)
from fl_elastic.flower.strategy_state import plain_values
from fl_elastic.state.archive import Kind, read_archive

KIND, VERSION = "fl_elastic.checkpoint", 6


def strategy() -> PartialUpdates:
    return PartialUpdates(
        quiet(FedAdam, eta=0.05),
        config=RoundConfig(delta_downlink=True),
        server_optimizer=SERVER_OPTIMIZERS.make("momentum", 0.5),
        average=ModelAverage(0.5),
    )


def trained(folder: Path, rounds: int = 2) -> Any:
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    return run(Checkpointed(strategy(), folder), apps, first_arrays(), rounds)[0]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and what is in it."""
    trained(tmp_path)
    path = tmp_path / "round-000002.state"
    (tmp_path / "round-000001.state").unlink()
    return path, entries_of(path)


def entries_of(path: Path) -> dict[str, Any]:
    """The arrays of a checkpoint, and its facts as the bytes of JSON."""
    found = read_archive(path, Kind(KIND, VERSION))
    about = json.dumps({"version": VERSION, **found.facts}).encode()
    return {**found.arrays, "about": np.frombuffer(about, np.uint8)}


def about(entries: dict[str, Any], **changes: Any) -> np.ndarray:
    fields = json.loads(entries["about"].tobytes()) | changes
    return np.frombuffer(json.dumps(fields).encode(), np.uint8)


def put(path: Path, entries: dict[str, Any]) -> None:
    """Write a checkpoint."""
    arrays = {name: array for name, array in entries.items() if name != "about"}
    text = entries["about"].tobytes() if "about" in entries else b"{}"
    try:
        version = json.loads(text)["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        version = VERSION
    path.write_bytes(crafted(KIND, version, text, arrays))


ONE = np.ones(1)
STATE: dict[str, np.ndarray] = {
    "state/on_round!number!": ONE,
    "state/server_optimizer!object!x": np.array("many"),
    "state/server_optimizer!object!counts/y": np.ones(3),
    "state/average!object!mean/more": ONE,
    "state/inner.aggregate_train!number!": ONE,
    "state/inner.__class__!number!": ONE,
    "state/inner.fraction_train!number!": ONE,
    "state/inner.train_metrics_aggr_fn!number!": np.ones(2),
    "state/inner.arrayrecord_key!number!": np.ones(2),
    "state/_weights!dict!x": ONE,
    "state/nobody!dict!x": ONE,
    "state/x": ONE,
    "state/x!y": ONE,
    "state/fleet!object!importance": ONE,
    "state/fleet!object!coverage/trained": np.zeros((2, 2)),
    "state/fleet!object!coverage/seen": np.zeros(3),
    "state/fleet!object!coverage/rounds": np.array(["x"]),
    "state/downlink!object!versions": np.zeros(99),
    "state/server_optimizer!object!moments/velocity/scale": np.zeros((7, 7)),
}


@pytest.mark.parametrize("entry", STATE)
def test_state_that_no_strategy_keeps_is_one_error(
    entry: str, written: tuple[Path, dict[str, Any]]
) -> None:
    path, entries = written
    put(path, entries | {entry: STATE[entry]})
    with pytest.raises(ElasticError) as caught:
        trained(path.parent, 4)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


OBJECTS: dict[str, tuple[str, str, Any]] = {
    "importance is not a number": ("fleet", "importance", {"head": float("nan")}),
    "a rate is out of reach": ("fleet", "rate", 1e-9),
    "a cut is a number": ("fleet", "cut", 3),
    "counts are words": ("server_optimizer", "counts", {"scale": "many"}),
    "a type is none": ("average", "dtypes", {"stem.weight": "complex999"}),
    "versions decrease": ("downlink", "changes", {"versions": [2, 1], "changed": {}}),
    "losses are no numbers": ("guard", "losses", [float("nan")]),
    "a size is negative": ("sizes", "usual", {"stem.weight": [-1.0]}),
    "nobody's state": ("nobody", "x", 1),
    "an attribute's attribute": ("fleet.config", "x", 1),
    "no object": ("rule", "x", 1),
}
VALUES: dict[str, tuple[str, Any]] = {
    "a method": ("inner.aggregate_train", 1),
    "a class": ("inner.__class__", 1),
    "a function": ("inner.train_metrics_aggr_fn", 1),
    "a text is a number": ("inner.arrayrecord_key", 1),
    "a number is a list": ("inner.fraction_train", {"list": [1]}),
    "a number is a state": ("inner.fraction_train", {"state": 1}),
    "of the wrapper itself": ("_warned", True),
    "an array that is not there": ("inner.m_t", {"array": "0"}),
    "an unknown kind": ("inner.m_t", {"evil": 1}),
    "a tensor that is not there": ("inner.m_t", {"tensor": "0", "as": ["float32", "cpu"]}),
    "no kind": ("inner.m_t", {}),
    "a dtype that is none": ("inner.m_t", {"scalar": ["evil", 1]}),
    "pairs of three": ("inner.m_t", {"dict": [[1, 2, 3]]}),
    "a key that cannot be one": ("inner.m_t", {"dict": [[{"list": []}, 1]]}),
    "no name": ("inner.", 1),
    "nobody's": ("nobody.x", 1),
}


@pytest.mark.parametrize("lie", OBJECTS)
def test_a_state_that_no_object_has_is_one_error(
    lie: str, written: tuple[Path, dict[str, Any]]
) -> None:
    path, entries = written
    where, name, value = OBJECTS[lie]
    objects = json.loads(entries["about"].tobytes())["objects"]
    objects[where] = {**objects.get(where, {}), name: value}
    put(path, entries | {"about": about(entries, objects=objects)})
    with pytest.raises(CheckpointError) as caught:
        trained(path.parent, 4)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("lie", VALUES)
def test_a_value_that_no_attribute_has_is_one_error(
    lie: str, written: tuple[Path, dict[str, Any]]
) -> None:
    path, entries = written
    where, value = VALUES[lie]
    objects = json.loads(entries["about"].tobytes())["objects"]
    given = plain_values(strategy()).get(where)
    objects[f"{where}!value!"] = [given, value]
    put(path, entries | {"about": about(entries, objects=objects)})
    with pytest.raises(CheckpointError) as caught:
        trained(path.parent, 4)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


ABOUT: dict[str, Any] = {
    "objects are a list": {"objects": ["fleet"]}, "round is a word": {"round": "two"},
    "round is huge": {"round": 10**30}, "round is negative": {"round": -1},
    "names are a number": {"names": 3}, "names are foreign": {"names": ["evil"]},
    "names are fewer": {"names": []}, "strategies are others": {"strategies": ["X"]},
    "strategies are a number": {"strategies": 3},
    "settings are a list": {"settings": ["lr"]}, "settings are no pairs": {"settings": {"lr": 1}},
    "a setting is an object": {"settings": {"lr": [None, {"x": 1}]}},
    "version is another": {"version": 99}, "version is lines": {"version": "1\n2"},
}  # fmt: skip


@pytest.mark.parametrize("lie", ABOUT)
def test_a_lying_head_is_one_error(lie: str, written: tuple[Path, dict[str, Any]]) -> None:
    path, entries = written
    put(path, entries | {"about": about(entries, **ABOUT[lie])})
    with pytest.raises(CheckpointError) as caught:
        trained(path.parent, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[" * 100_000, b'{"version": 2}'],
    ids=["nothing", "null", "deep", "version alone"],
)
def test_a_head_that_is_none_is_one_error(
    text: bytes, written: tuple[Path, dict[str, Any]]
) -> None:
    path, entries = written
    put(path, entries | {"about": np.frombuffer(text, np.uint8)})
    with pytest.raises(CheckpointError):
        load_checkpoint(path.parent, first_arrays())


def test_arrays_of_another_kind_are_one_error(written: tuple[Path, dict[str, Any]]) -> None:
    path, entries = written
    for other in (np.array(["x"] * 3), np.array([1j] * 3), np.zeros(4)):
        put(path, entries | {"array/untouched": other})
        with pytest.raises(CheckpointError):
            load_checkpoint(path.parent, first_arrays())


def test_a_file_that_is_longer_than_what_a_run_keeps_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "round-000001.state"
    path.write_bytes(b"FLEA")
    os.truncate(path, 3 << 30)
    with pytest.raises(CheckpointError, match="at most"):
        load_checkpoint(tmp_path, first_arrays())


def test_what_a_run_wrote_goes_on(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, entries = written
    put(path, entries)
    assert_identical(trained(path.parent, 4).arrays, trained(tmp_path / "other", 4).arrays)


def test_a_run_with_nothing_left_to_do_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trained(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        again = trained(tmp_path, 2)
    assert "nothing is left to do" in caplog.text and "round 2" in caplog.text
    assert_identical(again.arrays, first.arrays)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, 3)
    assert "nothing is left to do" not in caplog.text
    assert len(EXAMPLES) == 4
