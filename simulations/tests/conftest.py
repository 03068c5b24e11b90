"""Where the tests find real data, and caches that leave the user's own alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder with the real datasets; tests that need it are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    root = Path(os.environ.get("FL_ELASTIC_DATA_ROOT") or beside)
    if not root.is_dir():
        pytest.skip(f"no real data: {root} is not a folder; set FL_ELASTIC_DATA_ROOT")
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fl_elastic"
