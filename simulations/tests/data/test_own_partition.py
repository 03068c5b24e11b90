"""A split of one's own, and those of flwr-datasets where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.data.own_partition import dealt
from fl_elastic_simulations.data.partition import check_partition_name

LABELS = np.repeat(np.arange(4), 30)
OWNERS = np.tile(np.arange(6), 20)


def split(method: str, clients: int = 4, **given: Any) -> list[np.ndarray]:
    told: dict[str, Any] = {"alpha": 0.5, "seed": 0, "min_examples": 1, "owners": OWNERS}
    told["classes_per_client"] = 2
    return dealt(LABELS, clients, method=method, **(told | given))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "splits_of_mine.py").write_text(
        "import numpy as np\n"
        "def by_class(labels, clients):\n"
        "    return [np.flatnonzero(labels % clients == n) for n in range(clients)]\n"
        "def twice(labels, clients, seed=1):\n"
        "    return [[0, 1]] * clients\n"
        "def beyond(clients):\n"
        "    return [[n + 1000] for n in range(clients)]\n"
        "def few(clients):\n"
        "    return [[0]]\n"
        "def empty(clients):\n"
        "    return [[n] if n else [] for n in range(clients)]\n"
        "def odd(clients, mood):\n"
        "    return []\n"
        "def broken():\n"
        "    raise RuntimeError('not today')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "splits_of_mine"


def test_a_function_gets_what_it_asks_for(own: str) -> None:
    parts = split(f"{own}:by_class")
    assert [set(LABELS[part].tolist()) for part in parts] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("twice", "two clients"),
        ("beyond", "outside of 0 to 119"),
        ("few", "1 parts for 4 clients"),
        ("empty", "left client 0 with 0 examples, below min_examples 1: lower"),
        ("odd", "asks for 'mood'"),
        ("broken", "failed: RuntimeError: not today"),
        ("none", "has no 'none'"),
    ],
)
def test_what_is_no_split_is_refused(own: str, name: str, word: str) -> None:
    with pytest.raises(ScenarioError, match=word):
        split(f"{own}:{name}")


def test_names_are_checked_without_an_import() -> None:
    check_partition_name("dirichlet")
    check_partition_name("no.such:thing")
    with pytest.raises(ScenarioError, match="did you mean 'dirichlet'"):
        check_partition_name("dirichlett")


@pytest.mark.parametrize("name", ["IidPartitioner", "DirichletPartitioner", "LinearPartitioner"])
def test_partitioners_of_flwr_datasets(name: str) -> None:
    pytest.importorskip("flwr_datasets")
    parts = split(f"flwr_datasets.partitioner:{name}")
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))


def test_owners_of_flwr_datasets_are_clients() -> None:
    pytest.importorskip("flwr_datasets")
    parts = split("flwr_datasets.partitioner:NaturalIdPartitioner", clients=6)
    assert all(len(set(OWNERS[part].tolist())) == 1 for part in parts)


def test_what_a_partitioner_needs_besides_is_said_by_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr_datasets")
    with pytest.raises(ScenarioError, match="num_classes_per_partition"):
        split("flwr_datasets.partitioner:PathologicalPartitioner")
    (tmp_path / "two_classes_each.py").write_text(
        "from flwr_datasets.partitioner import PathologicalPartitioner\n"
        "def made(clients, seed):\n"
        "    return PathologicalPartitioner(clients, 'label', 2, seed=seed)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = split("two_classes_each:made")
    assert all(len(set(LABELS[part].tolist())) == 2 for part in parts)
