"""The documents as a site: it builds without a warning, and nothing in it is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

pytestmark = pytest.mark.slow

_FETCHED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built_and_reached_from_the_first(site: Path) -> None:
    first = (site / "index.html").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / path).exists()
        assert f'href="{path}"' in first, f"{path} is missing in the navigation"


def test_nothing_is_fetched_from_another_place(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert _FETCHED.findall(page.read_text()) == [], page.name
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text() and "@import" not in sheet.read_text()


def test_public_names_have_their_place_in_the_reference(site: Path) -> None:
    training = (site / "reference" / "training.html").read_text()
    assert 'id="fl_elastic.training.ElasticTrainer"' in training
    assert 'id="fl_elastic.training.ElasticTrainer.fit"' in training


def test_tables_are_tables(site: Path) -> None:
    """No row of a Markdown table is left as text, as it is where the line before it is in the way."""
    for page in site.rglob("*.html"):
        assert "| --- |" not in page.read_text(), page.name


def test_the_navigation_is_in_groups_that_can_be_overseen(site: Path) -> None:
    import yaml  # type: ignore[import-untyped]

    text = (ROOT / "mkdocs.yml").read_text()
    navigation = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    assert len(navigation) <= 10
    for entry in navigation:
        ((title, pages),) = entry.items()
        if title != "Reference":
            assert isinstance(pages, str) or len(pages) <= 8, title
    # Where a page is opened as a file it cannot be searched, and the first page says what to do.
    assert "http.server" in (site / "index.html").read_text()
