"""Windows of what roles say: nobody else's words, and the end of each role kept for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.data.plays import LENGTH, role_windows, windows_of

_SPEECH = "the quick brown fox jumps over the lazy dog again and again; "


def play(folder: Path, speeches: dict[str, int]) -> Path:
    """A text in which each role says so many times the same, beginning with its own name, in turns."""
    blocks = [
        f"{role}:\n{role.lower()} says {_SPEECH}"
        for turn in range(max(speeches.values()))
        for role, times in speeches.items()
        if turn < times
    ]
    path = folder / "tinyshakespeare" / "input.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\ufeff" + "\n\n".join(blocks), encoding="utf-8")
    return path


def test_windows_hold_one_roles_words_and_what_comes_next(tmp_path: Path) -> None:
    windows = role_windows(play(tmp_path, {"ANN": 40, "BEN": 30, "First Citizen": 2}))
    # The third says too little.
    assert set(windows.role) == {0, 1}
    for role, name in enumerate(("ann", "ben")):
        own = windows.role == role
        text = "".join(map(chr, np.concatenate([*windows.x[own]])))
        assert f"{name} says" in text and ("ben" if name == "ann" else "ann") not in text
        assert np.array_equal(windows.x[own][1:, 0], windows.y[own][:-1, -1])
        count = int(own.sum())
        assert windows.late[own].tolist() == [i >= 0.9 * count for i in range(count)]
    assert np.array_equal(windows.x[:, 1:], windows.y[:, :-1])


def test_the_dataset_deals_roles_and_tests_on_what_they_say_last(tmp_path: Path) -> None:
    windows = role_windows(play(tmp_path, {"ANN": 40, "BEN": 30}))
    dataset = load_dataset("plays", tmp_path)
    assert dataset.input_shape == (LENGTH,) and dataset.train_x.dtype == np.int64
    assert len(dataset.train_x) == int((~windows.late).sum()) and dataset.test_y.shape[1] == LENGTH
    assert dataset.owners is not None and dataset.labels.shape == dataset.owners.shape


@pytest.mark.parametrize("text", ["", "no roles at all", "ANN:\ntoo little"])
def test_another_text_is_told_from_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "input.txt"
    path.write_text(text)
    with pytest.raises(DatasetError, match="no role that says"):
        role_windows(path)


def test_a_missing_file_says_where_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no file .*input\.txt.*--data-root"):
        role_windows(tmp_path / "input.txt")


def test_what_is_not_ascii_is_a_question_mark() -> None:
    assert set(windows_of("\u00e9" * (LENGTH + 1)).ravel()) == {ord("?")}
    assert len(windows_of("")) == len(windows_of("a" * LENGTH)) == 0
