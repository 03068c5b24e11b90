"""The device catalogue: complete, plausible, sourced and overridable."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations import unequal
from fl_elastic_simulations.unequal.devices import catalogue, device

NAMES = ["pi_zero_2_w", "pi_3b_plus", "pi_4b", "pi_5", "jetson_nano", "laptop"]


def test_the_catalogue_holds_the_known_devices_under_their_names() -> None:
    assert list(catalogue()) == NAMES
    assert all(entry.name == name for name, entry in catalogue().items())


def test_slowdowns_order_the_devices_as_their_processors_do() -> None:
    order = ["laptop", "pi_5", "pi_4b", "jetson_nano", "pi_3b_plus", "pi_zero_2_w"]
    slowdowns = [device(name).slowdown for name in order]
    assert slowdowns == sorted(slowdowns)
    assert len(set(slowdowns)) == len(slowdowns)


def test_every_figure_has_a_source() -> None:
    text = resources.files(unequal).joinpath("catalogue.toml").read_text("utf-8")
    for entry in tomllib.loads(text).values():
        assert all(f"{figure}:" in entry["source"] for figure in ("slowdown", "memory", "link"))


def test_an_override_replaces_the_figure() -> None:
    changed = device("pi_4b", slowdown=7.0, downlink_bytes_per_second=2e6)
    assert (changed.slowdown, changed.downlink_bytes_per_second) == (7.0, 2e6)
    assert changed.uplink_bytes_per_second == device("pi_4b").uplink_bytes_per_second


def test_an_unknown_device_is_answered_with_the_nearest_and_all_known() -> None:
    with pytest.raises(ScenarioError) as caught:
        device("pi_zero_2w")
    assert "did you mean 'pi_zero_2_w'?" in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)
