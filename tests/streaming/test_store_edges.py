"""What a store is seldom asked: draws of nothing, ids of numpy's, rows of very unequal size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from foreseen_log import watched
from toy_streams import relabelled

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


def test_more_ids_than_a_query_has_letters(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "samples.db", 2**18) as store:
        store.add(np.zeros((9, 3), np.float32), [0] * 9)
        many = range(5, 10**9, 2000)
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
