"""The temporary folder of a local fleet: gone at the end, and after a kill with the next start."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fl_elastic.fleet.local import TemporaryFolder, remove_abandoned

OWNER = """
import time
from fl_elastic.fleet.local import TemporaryFolder
mine = TemporaryFolder()
print(mine.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_gone_when_closed(place: Path) -> None:
    made = TemporaryFolder()
    assert made.path.parent == place and made.path.stat().st_mode & 0o077 == 0
    (made.path / "secret").write_text("key")
    made.close()
    assert not list(place.iterdir())


def test_that_of_a_killed_process_goes_with_the_next_start(place: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "node.key").write_text("key")
        # It lives.
        assert remove_abandoned(place) == [] and (left / "node.key").exists()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert left.exists()
    next_one = TemporaryFolder()
    assert list(place.iterdir()) == [next_one.path]
    next_one.close()


def test_folders_without_a_mark_are_left_alone(place: Path) -> None:
    (place / "fl-elastic-fleet-mine").mkdir()
    (place / "fl-elastic-fleet-new").mkdir()
    (place / "fl-elastic-fleet-new" / ".held").touch()
    (place / "fl-elastic-fleet-file").touch()
    assert remove_abandoned(place) == [] and len(list(place.iterdir())) == 3
