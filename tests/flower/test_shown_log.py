"""Lines of logger fl_elastic are seen where Flower's are, unless somebody has said otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slow_ones import slow_unless

APP = """
import logging, sys
before, after = sys.argv[1:]
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from fl_elastic.flower import Checkpointed, PartialUpdates
exec(before)
strategy = Checkpointed(PartialUpdates(FedAvg()), "kept")
for _ in range(2):
    Checkpointed(PartialUpdates(FedAvg()), "kept")
exec(after)
logging.getLogger("fl_elastic").info("the head was solved")
logging.getLogger("fl_elastic").debug("a detail")
"""
UNSEEN = "logging.basicConfig(level=logging.WARNING)"
OWN = "logging.getLogger('fl_elastic').addHandler(logging.NullHandler())"
QUIET = "logging.getLogger('fl_elastic').setLevel(logging.WARNING)"


@pytest.mark.parametrize(
    ("before", "after", "times"),
    slow_unless(lambda *case: case == ("", "", 1), [("", "", 1), (UNSEEN, "", 0), ("", QUIET, 0)]),
)
def test_an_app_that_sets_up_no_logging_shows_them_once(
    before: str, after: str, times: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", APP, before, after], capture_output=True, text=True, cwd=tmp_path,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("the head was solved") == times
    assert "a detail" not in done.stdout + done.stderr
