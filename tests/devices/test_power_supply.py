"""Mains or battery, from made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tree import NOISE, grow
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.devices.power import PowerSupply, SupplyEntry, power_supply, read_supply

WORDS = (
    st.none() | st.text(max_size=12) | st.sampled_from(["Mains", "Battery", "Device", "1", "50"])
)


def supply(name: str, **files: str) -> dict[str, str | bytes]:
    return {f"sys/class/power_supply/{name}/{file}": text + "\n" for file, text in files.items()}


@given(st.lists(st.builds(SupplyEntry, WORDS, WORDS, WORDS, WORDS, WORDS), max_size=5))
def test_any_texts_are_read(entries: list[SupplyEntry]) -> None:
    found = read_supply(entries)
    assert found.on_mains in (True, False, None)
    assert found.battery is None or 0 <= found.battery <= 1


@given(st.integers(0, 100), st.booleans())
def test_a_battery_and_a_plug(percent: int, plugged: bool) -> None:
    found = read_supply(
        [
            SupplyEntry("Mains", online=str(int(plugged))),
            SupplyEntry("Battery", capacity=f"{percent}"),
        ]
    )
    assert found == PowerSupply(on_mains=plugged, battery=percent / 100)


@pytest.mark.parametrize(
    ("status", "on_mains"),
    [
        ("Discharging", False),
        ("Charging", True),
        ("Full", True),
        ("Not charging", True),
        ("Unknown", None),
    ],
)
def test_without_a_plug_the_battery_tells(status: str, on_mains: bool | None) -> None:
    assert read_supply([SupplyEntry("Battery", status=status)]).on_mains is on_mains


def test_a_laptop(tmp_path: Path) -> None:
    grow(tmp_path, supply("AC", type="Mains", online="0"))
    grow(tmp_path, supply("BAT0", type="Battery", capacity="80", status="Discharging"))
    grow(tmp_path, supply("BAT1", type="Battery", capacity="40", status="Unknown"))
    assert power_supply(tmp_path) == PowerSupply(on_mains=False, battery=pytest.approx(0.6))


def test_one_of_two_plugs_is_enough(tmp_path: Path) -> None:
    grow(tmp_path, supply("usb0", type="USB", online="0") | supply("usb1", type="USB", online="2"))
    assert power_supply(tmp_path).on_mains is True


def test_the_battery_of_a_mouse_does_not_feed_the_computer(tmp_path: Path) -> None:
    mouse = supply("hid", type="Battery", capacity="5", status="Discharging", scope="Device")
    assert power_supply(grow(tmp_path, mouse)) == PowerSupply(None, None)


@pytest.mark.parametrize("noise", NOISE)
def test_noise_says_nothing(tmp_path: Path, noise: str) -> None:
    grow(tmp_path, supply("x", type="Battery", capacity=noise, status=noise))
    grow(tmp_path, supply("y", type="Mains", online=noise))
    grow(tmp_path, {"sys/class/power_supply/z": "a file in place of a folder"})
    assert power_supply(tmp_path) == PowerSupply(None, None)
