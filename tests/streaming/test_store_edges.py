"""What a store is seldom asked: draws of nothing, ids of numpy's, rows of very unequal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreseen_log import watched
from toy_streams import relabelled

from fl_elastic.errors import StoreError
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.intake import checked_sample
from fl_elastic.streaming.store.changes import Offer
from fl_elastic.streaming.store.encoding import ENCODINGS


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nothing_is_drawn_where_there_is_nothing(encoding: str, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18, encoding=encoding) as store:
        assert len(store.sample(3)) == 0
        store.add(np.zeros(3, np.float32), None)
        assert store.sample(3).x.shape == store.take([7]).x.shape == (0, 3)
        assert len(store.sample(3, labelled=False)) == 1
        assert len(store.sample(3, labelled=False, version="another")) == 0


def test_ids_as_the_store_hands_them_out_find_their_samples(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(np.arange(12, dtype=np.float32).reshape(4, 3), [0, 1, 0, 1])
        ids = store.ids()
        assert store.take(ids).x[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]
        assert store.take(ids[::-1]).ids.tolist() == [4, 3, 2, 1]
        assert relabelled(store, ids[0], 5) and store.delete(ids=ids[:2]) == 2
        # What no id can be is nobody's.
        assert len(store.take([2**70, 3])) == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_sample_of_no_numbers_is_refused_and_counted(encoding: str, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18, encoding=encoding) as store:
        assert store.add(np.zeros((3, 0), np.float32), 0) is None
        assert store.rejected == {"the sample has no numbers": 1}
        assert store.add(np.zeros(3, np.float32), 0) == 1


@pytest.mark.slow
def test_more_ids_than_a_query_has_letters(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(np.zeros((9, 3), np.float32), [0] * 9)
        many = range(5, 10**9, 8000)
        assert len(store.take(many)) == 1 and store.delete(ids=many) == 1


def test_a_sample_of_one_number_is_like_the_next(tmp_path: Path) -> None:
    first = checked_sample(3.5, None)
    assert first.shape == () and checked_sample(4.5, first).shape == ()


@pytest.mark.parametrize(("encoding", "dtype"), [("raw", "float32"), ("fp16", "uint8")])
def test_each_row_is_foreseen_whatever_comes_beside_it(
    encoding: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen = watched(monkeypatch)
    store = SampleStore(tmp_path / "samples.db", 2**21, encoding=encoding)
    log = tmp_path / "samples.db-wal"
    x = np.ones((3, 2**15), dtype)
    for offers in ([Offer(x[0], 0)], [Offer(x[1], 0), Offer(np.ones(2**20, dtype), 0)]):
        before = log.stat().st_size
        foreseen.clear()
        store.change(offers)
        assert 2**15 < log.stat().st_size - before <= sum(foreseen)
    assert len(store) == 2 and sum(store.rejected.values()) == 1
    store.close()


@pytest.mark.parametrize(
    ("like", "x"),
    [
        (np.zeros(2, np.int8), np.array([300, 1])),
        (np.zeros(2, np.uint8), np.array([1, 300], np.uint16)),
        (np.zeros(2, np.float16), np.array([70000, 1])),
    ],
)
def test_a_number_that_does_not_fit_the_type_of_the_others_becomes_no_other_number(
    like: np.ndarray, x: np.ndarray, tmp_path: Path
) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(like, 0)
        assert store.add(x, 1) is None
        assert store.rejected == {f"a number is beyond the range of {like.dtype}": 1}
        assert store.add(x // 300, 1) == 2
        assert store.take([2]).x.tolist() == [(x // 300).tolist()]


def test_numbers_that_are_missing_are_not_what_stands_in_their_place(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        missing = np.ma.array([1.0, 2.0], np.float32, mask=[False, True])
        assert store.add(missing, 0) is None
        assert store.rejected == {"a number is masked": 1}
        assert store.add(np.ma.array([1.0, 2.0], np.float32), 0) == 1


def test_features_in_bfloat16_are_numbers(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor(1))
        assert store.sample(1).x.tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize("ids", [[1.7], ["1"], ["a"], [None], "12", 5, None, [float("nan")]])
def test_what_is_no_id_names_no_sample(ids: Any, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(np.zeros((4, 2), np.float32), [0, 1, 0, 1])
        for ask in (store.take, store.delete):
            with pytest.raises(StoreError):
                ask(ids)
        assert len(store) == 4
        assert store.delete([np.float64(1.0), np.uint8(2)]) == 2


@pytest.mark.parametrize("n", [-1, 2.5, "3", None, float("nan"), float("inf")])
def test_what_is_no_number_of_samples_draws_none(n: Any, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(np.zeros((4, 2), np.float32), [0, 1, 0, 1])
        with pytest.raises(StoreError, match="sample"):
            store.sample(n)
        assert len(store.sample(np.int64(3))) == len(store.sample(3.0)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [float("nan"), float("inf"), None, "many"])
def test_a_capacity_is_a_number_of_bytes(capacity: Any, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a number of bytes"):
        SampleStore(tmp_path / "samples.db", capacity)


@pytest.mark.parametrize(
    ("encoding", "held", "beyond"),
    [
        ("raw", (3e38, -3e38), None), ("fp16", (65_504.0, -65_504.0), (65_600.0, 1.0)),
        ("int8", (1.5e38, -1.5e38), (3e38, -3e38)),
    ],
)  # fmt: skip
def test_a_number_beyond_the_encoding_is_rejected_and_not_kept_as_another(
    encoding: str, held: tuple[float, ...], beyond: tuple[float, ...] | None, tmp_path: Path
) -> None:
    with SampleStore(tmp_path / "samples.db", 2**20, encoding=encoding) as store:
        assert store.add(np.array(held, np.float32), 0) == 1
        if beyond is not None:
            assert store.add(np.array(beyond, np.float32), 0) is None
            assert store.rejected == {f"a number is beyond the range of the encoding {encoding}": 1}
        np.testing.assert_allclose(store.sample(5).x, [held], rtol=5e-3)
