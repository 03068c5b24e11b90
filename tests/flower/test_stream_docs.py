"""The script in docs/streams.md runs as it stands, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fl_elastic
from fl_elastic.streaming.joining import JOINING_RULES

DOCUMENT = Path(fl_elastic.__file__).parents[1] / "docs" / "streams.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks()[0], "streams.md", "exec"), {})
    accuracy = float(capsys.readouterr().out.split()[0])
    assert accuracy > 0.75 and (tmp_path / "state" / "learner.npz").exists()


def test_the_app_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = blocks()[1]
    assert "from my_project import Net" in block
    exec(compile(block.replace("from my_project import Net", ""), "streams.md", "exec"), {})


def test_every_rule_is_in_the_table() -> None:
    for name in JOINING_RULES.names():
        assert f"| `{name}` |" in DOCUMENT.read_text()
