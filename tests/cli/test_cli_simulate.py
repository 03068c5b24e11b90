"""How ``fl-elastic simulate`` fails: one line, and nothing half-written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended, call

DEMO = Path(__file__).resolve().parents[2] / "simulations" / "scenarios" / "demo.toml"

Simulate = Callable[..., Ended]


@pytest.fixture
def simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Simulate:
    """``fl-elastic simulate`` with a folder that does not exist yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def simulated_by(*arguments: object, output: object = "out") -> Ended:
        return call(monkeypatch, capsys, "simulate", *arguments, "--output", output)

    return simulated_by


# One of each kind: `test_scenario_problems.py` and `test_simulated_federation.py` of the laboratory have all.
FAILURES = {
    "typo in a key": ("training.round=1", "unknown key (did you mean 'rounds'?)"),
    "unknown policy": ("methods=full,elastik", "did you mean 'elastic'?"),
    "unknown optimizer": ("method.elastic.server_optimizer=agrement", "did you mean 'agreement'?"),
    "unknown device": ("fleet.0.device=pi_zero_w", "pi_zero"),
    "no seed": ("seeds=", "seeds"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_wrong_setting_is_one_line(name: str, simulate: Simulate, tmp_path: Path) -> None:
    change, hint = FAILURES[name]
    ended = simulate(DEMO, "--set", change)
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert hint in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "hint", "lines"),
    [
        (b"title = [", "mine.toml is not valid TOML", 1),
        # What is incomplete is a list of what is missing.
        (b"", "fleet: empty", 5),
    ],
)
def test_a_file_that_is_no_scenario_says_why(
    content: bytes, hint: str, lines: int, simulate: Simulate, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    ended = simulate(path)
    assert ended.is_error_of_lines(lines), (ended.status, ended.err, ended.out)
    assert hint in ended.err and "mine.toml" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "hint"), [("missing.toml", "no scenario file missing.toml"), (".", "cannot be read")]
)
def test_a_missing_file_is_one_line(path: str, hint: str, simulate: Simulate) -> None:
    ended = simulate(path)
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert hint in ended.err


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_missing_dataset_is_one_line(folder: str, simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = simulate(
        DEMO, "--set", "data.dataset=cifar10_jpegq75", "--set", "model.name=small_cnn",
        "--data-root", tmp_path / folder,
    )  # fmt: skip
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert "cifar10_jpegq75" in ended.err
    assert "FL_ELASTIC_DATA_ROOT" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["blocked", "blocked/deeper"])
def test_an_output_that_cannot_be_a_folder_is_one_line(
    output: str, simulate: Simulate, tmp_path: Path
) -> None:
    (tmp_path / "blocked").write_text("in the way")
    ended = simulate(DEMO, output=output)
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert "output folder" in ended.err
    assert (tmp_path / "blocked").read_text() == "in the way"


def test_an_output_that_may_not_be_written_is_one_line(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system that is mounted read-only, where even root may not write."""
    folder = tmp_path / "out"
    folder.mkdir()
    allowed = os.access

    def read_only(path: object, mode: int) -> bool:
        return not (path == folder and mode & os.W_OK) and allowed(path, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "access", read_only)
    ended = simulate(DEMO)
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert str(folder) in ended.err
    assert list(folder.iterdir()) == []


def test_all_mistakes_are_told_at_once(simulate: Simulate) -> None:
    ended = simulate(
        DEMO, "--set", "training.rounds=0", "--set", "data.dataset=digit",
        "--set", "fleet.1.count=0",
    )  # fmt: skip
    assert ended.is_error_of_lines(4), (ended.status, ended.err, ended.out)
    for hint in ("training.rounds", "data.dataset", "fleet.1.count"):
        assert hint in ended.err


@pytest.mark.parametrize("arguments", [(), (DEMO, "--rounds", "3"), (DEMO, "--set")])
def test_wrong_usage_is_explained(arguments: tuple[object, ...], simulate: Simulate) -> None:
    ended = simulate(*arguments, output="out")
    assert ended.status in (1, 2)
    assert ended.err
    assert "Traceback" not in ended.err
