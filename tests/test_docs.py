"""What the documents refer to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_TEST = re.compile(r"((?:simulations/)?tests/[\w/]+\.py)(?:::(\w+))?")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    for file, name in _TEST.findall(document.read_text()):
        path = ROOT / file
        assert path.exists(), f"{document.name} names {file}"
        if name:
            assert f"def {name}(" in path.read_text(), f"{document.name} names {file}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_files_exist(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name} links {target}"


def test_federated_streams_in_the_table_are_the_committed_ones() -> None:
    results = ROOT / "simulations" / "results" / "stream-federation.json"
    rows = json.loads(results.read_text())["rows"]
    text = (ROOT / "docs" / "streams.md").read_text()
    means = [row for name, row in rows.items() if name.startswith("summary ")]
    assert len(means) == 7
    for row in means:
        figures = (
            f"| {row['recovery']:.0f} | {100 * row['recovered']:.0f} | {row['to_level']:.0f} | "
        )
        figures += f"{row['late_to_level']:.0f} | {100 * row['after_drift']:.1f} | {100 * row['not_hit']:.1f} |"
        assert figures in text
