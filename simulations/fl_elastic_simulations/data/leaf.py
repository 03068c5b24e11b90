"""Data sets of LEAF, whose writers and roles are natural clients, and a corpus of Shakespeare's plays by role.

LEAF (Caldas et al., 2018, "LEAF: A Benchmark for Federated Settings") writes one JSON file or more for each split,
with ``users`` and, for each of them, inputs and classes. Where its files are not found and ``datasets`` of Hugging
Face is installed, that fetches the same data as Flower publishes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError
from fl_elastic.registry import first_line
from fl_elastic.storage import write_atomically
from fl_elastic_simulations.data.datasets import Dataset

__all__ = ["CHARACTERS", "femnist", "shakespeare", "tinyshakespeare"]

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet; every other character counts as the last class, which is one more."""

_INDEX = {character: number for number, character in enumerate(CHARACTERS)}
_WINDOW = 80
_PLAYS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_SPEECH = re.compile(r"^([A-Z][A-Za-z' ]+):\n(.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
_TEST_SHARE = 0.2
_FEWEST_CHARACTERS = 1000

Array = npt.NDArray[Any]
Rows = Iterator[tuple[str, Any, Any]]
"""Owner, input and class of each example."""


def femnist(root: Path) -> Dataset:
    """FEMNIST: handwritten characters of 62 classes, 28x28, by writer; white is 1, as LEAF writes it."""

    def image(x: Any) -> Array:
        pixels: Array = np.asarray(x, np.float32)
        # LEAF writes 784 numbers from 0 to 1; a picture has bytes.
        pixels = pixels / 255 if pixels.max(initial=0) > 1 else pixels
        return pixels.reshape(1, 28, 28)

    rows = _leaf_rows("femnist", root, "flwrlabs/femnist", ("writer_id", "image", "character"))
    return _dataset("femnist", rows, image, int, 62, (1, 28, 28))


def shakespeare(root: Path) -> Dataset:
    """Shakespeare as LEAF has it: the character after 80 others, by role."""
    rows = _leaf_rows("shakespeare", root, "flwrlabs/shakespeare", ("character_id", "x", "y"))
    return _dataset("shakespeare", rows, _codes, _code, len(CHARACTERS) + 1, (_WINDOW,))


def tinyshakespeare(root: Path) -> Dataset:
    """40,000 lines of Shakespeare's plays, by role; of each role the last fifth is for testing.

    Windows of 80 characters, the next one the class, every 40 characters; roles of a thousand characters or more.
    """
    path = root / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        _fetch(_PLAYS, path)
    try:
        text = path.read_text("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"tinyshakespeare: {path} is damaged ({error}): fetch it again"
        ) from None
    said: dict[str, list[str]] = {}
    for role, speech in _SPEECH.findall(text):
        said.setdefault(role, []).append(speech)
    rows: dict[str, list[tuple[str, Any, Any]]] = {"train": [], "test": []}
    for role, speeches in sorted(said.items()):
        words = "\n".join(speeches)
        if len(words) < _FEWEST_CHARACTERS:
            continue
        cut = int(len(words) * (1 - _TEST_SHARE))
        for split, part in (("train", words[:cut]), ("test", words[cut:])):
            for start in range(0, len(part) - _WINDOW, _WINDOW // 2):
                window = part[start : start + _WINDOW]
                rows[split].append((role, window, part[start + _WINDOW]))
    found = {split: iter(each) for split, each in rows.items()}
    return _dataset("tinyshakespeare", found, _codes, _code, len(CHARACTERS) + 1, (_WINDOW,))


def _code(character: Any) -> int:
    return _INDEX.get(str(character)[:1], len(CHARACTERS))


def _codes(text: Any) -> Array:
    # Data sets are float32; models of text turn them into whole numbers.
    return np.array([_code(character) for character in text], np.float32)


def _leaf_rows(
    name: str, root: Path, published: str, columns: tuple[str, str, str]
) -> dict[str, Rows]:
    """Return the rows of both splits: of LEAF's own files, or of what Flower publishes."""
    folders = {split: root / name / split for split in ("train", "test")}
    files = {split: sorted(folder.glob("*.json")) for split, folder in folders.items()}
    if all(files.values()):
        return {split: _read_leaf(name, paths) for split, paths in files.items()}
    try:
        from datasets import load_dataset
    except ImportError:
        raise DatasetError(
            f"{name}: no files {folders['train']}/*.json and {folders['test'].name}/*.json, as LEAF's "
            "preprocess.sh writes them: give the folder with --data-root or FL_ELASTIC_DATA_ROOT, or "
            f"pip install datasets to fetch {published}"
        ) from None
    try:
        everything = load_dataset(published, split="train", cache_dir=str(root / "huggingface"))
    # Any failure of the network or the disk ends up here.
    except Exception as error:
        raise DatasetError(
            f"{name}: {published} could not be fetched: {first_line(error)}"
        ) from None
    owner, x, y = columns
    last: dict[str, int] = {}
    counts: dict[str, int] = {}
    for each in everything[owner]:
        counts[str(each)] = counts.get(str(each), 0) + 1
    test: list[tuple[str, Any, Any]] = []
    train: list[tuple[str, Any, Any]] = []
    for row in everything:
        who = str(row[owner])
        seen = last[who] = last.get(who, 0) + 1
        late = seen > counts[who] * (1 - _TEST_SHARE)
        (test if late else train).append((who, row[x], row[y]))
    return {"train": iter(train), "test": iter(test)}


def _read_leaf(name: str, paths: list[Path]) -> Rows:
    for path in paths:
        try:
            found = json.loads(path.read_text("utf-8"))
            for user in found["users"]:
                data = found["user_data"][user]
                for x, y in zip(data["x"], data["y"], strict=True):
                    yield str(user), x, y
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{name}: {path} is not as LEAF writes it ({first_line(error)}): fetch it again"
            ) from None


def _dataset(
    name: str,
    rows: dict[str, Rows],
    input_of: Callable[[Any], Array],
    class_of: Callable[[Any], int],
    classes: int,
    shape: tuple[int, ...],
) -> Dataset:
    parts: dict[str, tuple[Array, Array, list[str]]] = {}
    for split in ("train", "test"):
        owners, inputs, labels = [], [], []
        try:
            for owner, x, y in rows[split]:
                owners.append(owner)
                inputs.append(input_of(x))
                labels.append(class_of(y))
            stacked = np.stack(inputs).astype(np.float32)
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"{name}: an example for {split} cannot be read: {first_line(error)}"
            ) from None
        parts[split] = stacked, np.array(labels, np.int64), owners
        if stacked.shape[1:] != shape or not 0 <= min(labels) <= max(labels) < classes:
            raise DatasetError(
                f"{name}: inputs of shape {stacked.shape[1:]} and classes up to {max(labels)}, not {shape} and "
                f"up to {classes - 1}: the files are of other data"
            )
    number = {owner: place for place, owner in enumerate(sorted(set(parts["train"][2])))}
    owners_of = np.array([number[owner] for owner in parts["train"][2]], np.int64)
    return Dataset(name, *parts["train"][:2], *parts["test"][:2], classes, shape, owners_of)


def _fetch(address: str, path: Path) -> None:
    try:
        with urlopen(address, timeout=60) as answer:
            content = answer.read()
        write_atomically(path, content)
    except OSError as error:
        raise DatasetError(
            f"{path.parent.name}: no file {path}, and {address} could not be fetched ({first_line(error)}): give "
            "the folder that holds it with --data-root or FL_ELASTIC_DATA_ROOT, or a network"
        ) from None
