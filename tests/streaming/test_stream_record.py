"""The record along a stream: bounded, nothing counted twice or lost, there again after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.streaming.progress import StreamRecord


def recorded(correct: list[bool], record: StreamRecord) -> StreamRecord:
    for labelled, right in enumerate(correct, 1):
        if record.scored(right, drift=False, labelled=labelled):
            record.mark(labelled, 10 * labelled, {0: labelled, 3: 0})
    return record


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 9), st.integers(1, 5))
def test_every_prediction_is_in_one_point(correct: list[bool], most: int, every: int) -> None:
    record = recorded(correct, StreamRecord(most=most, every=every))
    points = record.points
    assert len(points) <= most
    assert sum(point.samples for point in points) + record.samples == len(correct)
    hits = sum(point.accuracy * point.samples for point in points) + record.right
    assert hits == pytest.approx(sum(correct))
    start = 0
    for point in points:
        assert point.labelled % record.every == 0
        own = correct[start : point.labelled]
        assert point.samples == len(own)
        assert point.accuracy == pytest.approx(sum(own) / len(own))
        start = point.labelled


def test_a_long_stream_is_covered_from_its_start_to_its_end() -> None:
    record = recorded([True] * 10_000, StreamRecord(most=64, every=1))
    assert 32 <= len(record.points) <= 64
    assert record.points[0].labelled <= 10_000 / 32
    assert record.points[-1].labelled > 10_000 - 2 * record.every


def test_classes_without_a_sample_are_left_out_and_facts_are_json() -> None:
    record = recorded([True, False, True, True], StreamRecord(most=8, every=2))
    record.scored(False, drift=True, labelled=5)
    again = from_archive(StreamRecord, to_archive(record))
    assert again == record
    assert again.drifts == [5]
    assert again.points[0].stored == {"0": 2}


def test_drifts_are_bounded_too() -> None:
    record = StreamRecord(most=3)
    for labelled in range(1, 11):
        record.scored(True, drift=True, labelled=labelled)
    assert record.drifts == [8, 9, 10]
