"""Data sets of many owners, read from files in the form in which they are published."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data import leaf
from fl_elastic_simulations.data.datasets import DATASETS, load_dataset

AT_HAND = Path(__file__).parents[4] / "shared" / "data"


def write_leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    """A file as LEAF's preprocess.sh writes it."""
    folder.mkdir(parents=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / "all_data_0_niid_0_keep_0_train_9.json").write_text(json.dumps(content))


def test_femnist_of_leaf_has_its_writers(tmp_path: Path) -> None:
    def picture(value: float) -> list[float]:
        return [value] * 784

    users = {"f0001": ([picture(1.0), picture(0.5)], [3, 61]), "f0002": ([picture(0.0)], [10])}
    write_leaf(tmp_path / "femnist" / "train", users)
    write_leaf(tmp_path / "femnist" / "test", {"f0001": ([picture(0.25)], [3])})
    found = load_dataset("femnist", tmp_path)
    assert found.train_x.shape == (3, 1, 28, 28) and found.train_x.dtype == np.float32
    assert found.train_y.tolist() == [3, 61, 10] and found.classes == 62
    assert found.owners is not None and found.owners.tolist() == [0, 0, 1]
    assert found.train_x[:, 0, 0, 0].tolist() == [1.0, 0.5, 0.0]
    assert DATASETS.get("femnist").owner == "writer"


def test_shakespeare_of_leaf_is_characters(tmp_path: Path) -> None:
    users = {"HAMLET": (["to be " * 13 + "or", "q" * 80], ["n", "é"])}
    for split in ("train", "test"):
        write_leaf(tmp_path / "shakespeare" / split, users)
    found = load_dataset("shakespeare", tmp_path)
    assert found.train_x.shape == (2, 80)
    assert "".join(leaf.CHARACTERS[int(code)] for code in found.train_x[0]) == users["HAMLET"][0][0]
    assert found.train_y.tolist() == [leaf.CHARACTERS.index("n"), len(leaf.CHARACTERS)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not as LEAF"),
        ('{"users": ["a"]}', "not as LEAF"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1]}}}', "cannot be read"),
    ],
)
def test_damaged_files_are_said_to_be(tmp_path: Path, text: str, word: str) -> None:
    for split in ("train", "test"):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        (tmp_path / "femnist" / split / "a.json").write_text(text)
    with pytest.raises(DatasetError, match=word):
        load_dataset("femnist", tmp_path)


def test_without_files_the_error_says_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"preprocess.sh .* pip install datasets"):
        load_dataset("shakespeare", tmp_path)


def test_without_files_what_flower_publishes_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Hugging Face's package, whose hub no test reaches."""
    rows = [
        {"writer_id": w, "image": np.full((28, 28), 255, np.uint8), "character": c}
        for w in ("b", "a")
        for c in range(5)
    ]
    asked: list[str] = []

    class Table(list[dict[str, Any]]):
        def __getitem__(self, key: Any) -> Any:
            return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def load(name: str, split: str, cache_dir: str) -> Table:
        asked.append(f"{name} {split}")
        return Table(rows)

    stand_in = ModuleType("datasets")
    stand_in.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    found = load_dataset("femnist", tmp_path)
    assert asked == ["flwrlabs/femnist train"]
    assert found.train_y.tolist() == [0, 1, 2, 3] * 2 and found.test_y.tolist() == [4, 4]
    assert found.owners is not None and found.owners.tolist() == [1] * 4 + [0] * 4
    assert found.train_x.max() == 1.0


def test_the_plays_at_hand_are_split_by_role() -> None:
    if not (AT_HAND / "tinyshakespeare" / "input.txt").is_file():
        pytest.skip("shared/data/tinyshakespeare is not here")
    found = load_dataset("tinyshakespeare", AT_HAND)
    assert found.owners is not None and 100 < len(np.unique(found.owners)) <= 150
    assert len(found.train_y) > 15_000 and len(found.test_y) > 3_000
    # The class is what comes after the window: the next window of the same role begins half a window on.
    assert found.train_x[1][:40].tolist() == found.train_x[0][40:].tolist()
    assert found.train_y[0] == int(found.train_x[2][0])
    assert found.train_y.max() < found.classes


def test_plays_that_are_missing_are_fetched_from_where_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech = "JOHN:\n" + "I come from Acklington. " * 60 + "\n\n"
    asked: list[str] = []

    def answer(address: str, timeout: float) -> Any:
        asked.append(address)
        return io.BytesIO(speech.encode("utf-8-sig"))

    monkeypatch.setattr(leaf, "urlopen", answer)
    found = load_dataset("tinyshakespeare", tmp_path)
    assert asked[0].endswith("tinyshakespeare/input.txt") and len(found.train_y) > 20
    assert (tmp_path / "tinyshakespeare" / "input.txt").is_file()


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, timeout: float) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(leaf, "urlopen", refuse)
    with pytest.raises(DatasetError, match=r"could not be fetched .* --data-root"):
        load_dataset("tinyshakespeare", tmp_path / "none")


def test_cifar_100_is_read_as_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny archive in the published form, with the checksums of its own files."""
    datasets = pytest.importorskip("torchvision.datasets")
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for split, count in (("train", 6), ("test", 3)):
        rows = {
            "data": np.full((count, 3072), 128, np.uint8), "fine_labels": [99, 0, 5] * (count // 3)
        }  # fmt: skip
        (folder / split).write_bytes(pickle.dumps(rows))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(n) for n in range(100)]}))
    monkeypatch.setattr(datasets.CIFAR100, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_, **__: True)
    found = load_dataset("cifar100", tmp_path)
    assert found.train_x.shape == (6, 3, 32, 32) and found.classes == 100
    assert found.train_y.tolist() == [99, 0, 5] * 2
