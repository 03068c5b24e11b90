"""What is read from a summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
