"""What a fleet's clients know of each group's importance, out of their state folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fl_elastic.flower.client_state import ClientState
from fl_elastic.training import SelectionState
from fl_elastic.update import Manifest
from fl_elastic_simulations.engine.known_importance import known_importance

MANIFEST = Manifest.of(nn.Linear(2, 2))
OTHER = Manifest.of(nn.Linear(3, 3))


def kept(folder: Path, scores: list[float | None], manifest: Manifest = MANIFEST) -> Path:
    state = ClientState(folder, manifest)
    state.selection = SelectionState(("head", "stem"), scores, [0, 0], probe_gap=1)
    state.keep_selection()
    return folder


def test_it_is_the_mean_share_of_those_that_know_all_groups(tmp_path: Path) -> None:
    folders = [
        kept(tmp_path / "a", [3.0, 1.0]),
        # What would increase the loss is worth nothing.
        kept(tmp_path / "b", [20.0, -5.0]),
        kept(tmp_path / "half", [0.0, None]),
        kept(tmp_path / "none", [-1.0, 0.0]),
        kept(tmp_path / "other", [0.0, 1.0], OTHER),
        tmp_path / "without",
    ]
    found = known_importance(folders, MANIFEST)
    assert found == pytest.approx({"head": 0.875, "stem": 0.125})
    assert list(found) == ["head", "stem"]


def test_nobody_knows_anything_at_first(tmp_path: Path) -> None:
    assert known_importance([], MANIFEST) == {}
    assert known_importance([kept(tmp_path, [])], MANIFEST) == {}
