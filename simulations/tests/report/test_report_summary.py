"""What is read from a summary, and how a wrong one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import ElasticError
from fl_elastic_simulations.report.summary import DeviceClass, read_summary


def test_every_part_is_read(make_summary: Callable[..., dict[str, Any]]) -> None:
    results = read_summary(make_summary(("full", "elastic"), seeds=2, rounds=5))
    elastic = results.methods[1]
    assert (results.clients, results.rounds, results.seeds) == (10, 5, (0, 1))
    assert [method.name for method in results.methods] == ["full", "elastic"]
    assert results.devices[0] == DeviceClass(
        device="pi_zero_2w",
        label="Raspberry Pi Zero 2 W",
        count=2,
        slowdown=12.0,
        requested_speedup=2.5,
    )
    assert len(elastic.history) == 2 * 6
    assert len(elastic.coverage["pi_5"]) == 5
    assert elastic.devices["pi_zero_2w"].requested_speedup == 2.5


def test_numpy_numbers_are_numbers() -> None:
    entry = {"final_accuracy": np.float32(0.5), "rejected_updates": np.int64(3)}
    method = read_summary({"methods": {"full": entry}}).methods[0]
    assert (method.final_accuracy, method.rejected_updates) == (0.5, 3)


def test_rounds_that_were_not_evaluated_are_left_out() -> None:
    history = [{"seed": 0, "round": 0, "accuracy": None}, {"seed": 0, "round": 1, "accuracy": 0.5}]
    method = read_summary({"methods": {"full": {"history": history}}}).methods[0]
    assert [point.round for point in method.history] == [1]


def test_device_classes_that_only_a_method_names_are_added() -> None:
    entry = {"devices": {"phone": {}}, "coverage": {"watch": [[1.0]], "phone": [[1.0]]}}
    results = read_summary({"devices": [{"device": "pi"}], "methods": {"full": entry}})
    assert [(device.device, device.shown) for device in results.devices] == [
        ("pi", "pi"),
        ("phone", "phone"),
        ("watch", "watch"),
    ]


@pytest.mark.parametrize(
    ("summary", "complaint"),
    [
        ([], "the summary is []: "),
        ({}, "the summary has no methods"),
        ({"methods": {}}, "the summary has no methods"),
        ({"methods": ["full"]}, "methods.0 is 'full': "),
        ({"methods": {"full": 3}}, "methods.full is 3: "),
        (
            {"methods": {"full": {"final_accuracy": "high"}}},
            "methods.full.final_accuracy is 'high': ",
        ),
        ({"methods": {"full": {"uplink_bytes": True}}}, "methods.full.uplink_bytes is True: "),
        (
            {"methods": {"full": {"coverage": {"pi": [[1.0], [None, "x"]]}}}},
            "methods.full.coverage.pi.1.1 is 'x': ",
        ),
        (
            {"methods": {"full": {"history": [{"accuracy": 0.5}]}}},
            "methods.full.history.0.round is ",
        ),
        ({"methods": {"full": {}}, "groups": "fc"}, "groups is 'fc': "),
        ({"methods": {"full": {"rejections": [{"reason": "late"}]}}}, "methods.full.rejections"),
        (
            {"methods": {"full": {"rejections": [{"round": 1, "updates": "many"}]}}},
            "methods.full.rejections",
        ),
        (
            {"methods": {"full": {"rejections": [{"round": None, "updates": 1}]}}},
            "methods.full.rejections",
        ),
        ({"methods": {"full": {"devices": {"pi": {"peak_bytes": "x"}}}}}, "methods.full.devices"),
    ],
)
def test_a_wrong_part_is_named(summary: Any, complaint: str) -> None:
    with pytest.raises(ElasticError) as caught:
        read_summary(summary)
    assert str(caught.value).startswith(complaint)


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    with pytest.raises(ElasticError) as caught:
        read_summary({"methods": "x" * 10_000})
    assert len(str(caught.value)) < 200
