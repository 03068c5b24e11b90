"""Two learners on one state folder: none loses samples of the other without a word."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fl_elastic.errors import StreamError
from fl_elastic.state.files import only_one
from fl_elastic.streaming import ClosedForm, SampleStore, StreamLearner
from fl_elastic.streaming.folder_lock import owning


def learner_in(folder: Path, classes: tuple[int, ...] = ()) -> StreamLearner:
    return StreamLearner(
        nn.Sequential(nn.Linear(3, 2)), SampleStore(folder / "samples.db", 2**20),
        head=ClosedForm(), state_dir=folder, detector="none", classes=classes,
    )  # fmt: skip


def observe(learner: StreamLearner, count: int) -> None:
    for place in range(count):
        learner.observe(np.full(3, place, np.float32), place % 2)


def test_a_later_learner_takes_over_and_the_earlier_one_is_refused(tmp_path: Path) -> None:
    first = learner_in(tmp_path)
    observe(first, 30)
    with pytest.raises(StreamError, match="the saved classes begin with"):
        learner_in(tmp_path, (5,))
    # Whoever cannot be made takes nothing over.
    observe(first, 30)
    second = learner_in(tmp_path)
    assert second.progress.observed == 60
    for use in (lambda: observe(first, 1), lambda: first.label(3, 1), first.tick, first.save):
        with pytest.raises(
            StreamError, match="a later StreamLearner of this process has taken over"
        ):
            use()
    observe(second, 30)
    assert not first.close() and second.close()
    with learner_in(tmp_path) as third:
        assert third.progress.observed == 90
        assert len(third.store) + len(third._memory.held_out) == 90


def test_another_process_is_kept_out_until_the_learner_ends(tmp_path: Path) -> None:
    asks = (
        "import sys; from fl_elastic.streaming.folder_lock import owning\n"
        "with owning(sys.argv[1]): print('mine')"
    )

    def asked() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", asks, str(tmp_path / "state")]
        return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)

    learner = learner_in(tmp_path / "state")
    assert "another process learns in the state folder" in asked().stderr
    later = learner_in(tmp_path / "state")
    learner.close()
    assert "another process learns in the state folder" in asked().stderr
    later.close()
    assert asked().stdout == "mine\n"


def test_a_folder_is_free_again_after_a_learner_is_gone_or_was_never_made(tmp_path: Path) -> None:
    with only_one(tmp_path / "other" / ".lock"):
        with pytest.raises(StreamError, match=r"another process learns.*--state-dir"):
            learner_in(tmp_path / "other")
    learner_in(tmp_path / "other").close()
    with pytest.raises(ValueError), owning(tmp_path / "own"):
        raise ValueError
    with only_one(tmp_path / "own" / ".lock"):
        pass
    learner_in(tmp_path / "lost")
    gc.collect()
    with only_one(tmp_path / "lost" / ".lock"):
        pass
