"""Heat and throttling, from made-up trees of a Pi and of other boards."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tree import NOISE, command, grow
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.devices.vitals import (
    Throttling,
    parse_celsius,
    parse_throttled,
    temperature,
    throttling,
)

PI_4 = "sys/devices/platform/soc/soc:firmware/get_throttled"
PI_5 = "sys/devices/platform/soc@107c000000:firmware/get_throttled"


@given(st.text(max_size=40))
def test_any_text_is_a_sane_temperature_or_none(text: str) -> None:
    degrees = parse_celsius(text)
    assert degrees is None or -55 <= degrees <= 150


@given(st.integers(-55_000, 150_000))
def test_thousandths_of_a_degree(value: int) -> None:
    assert parse_celsius(f" {value}\n") == pytest.approx(value / 1000)


@given(st.text(max_size=40))
def test_any_text_is_flags_or_none(text: str) -> None:
    assert parse_throttled(text) is None or isinstance(parse_throttled(text), Throttling)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["throttled=0x{:x}\n", "{:x}", "0x{:X}"]))
def test_every_flag_has_its_bit(bits: int, shape: str) -> None:
    flags = parse_throttled(shape.format(bits))
    assert flags is not None
    assert flags.under_voltage == bool(bits & 0x1)
    assert flags.slowed == bool(bits & 0xE)


def test_the_hottest_zone_counts_and_broken_ones_do_not(tmp_path: Path) -> None:
    zone = "sys/class/thermal/thermal_zone{}/temp"
    grow(tmp_path, {zone.format(0): "61234\n", zone.format(1): "-274000", zone.format(2): "x"})
    grow(tmp_path, {"sys/class/hwmon/hwmon0/temp1_input": "90000"})
    assert temperature(tmp_path) == pytest.approx(61.234)


def test_without_zones_the_monitors_are_asked(tmp_path: Path) -> None:
    grow(tmp_path, {"sys/class/thermal/thermal_zone0/temp": "broken"})
    grow(tmp_path, {"sys/class/hwmon/hwmon3/temp2_input": "52500"})
    assert temperature(tmp_path) == pytest.approx(52.5)


@pytest.mark.parametrize("path", [PI_4, PI_5])
def test_flags_from_the_firmwares_file(tmp_path: Path, path: str) -> None:
    flags = throttling(grow(tmp_path, {path: "50005\n"}))
    assert flags is not None and flags.under_voltage and flags.slowed


def test_flags_from_the_command(tmp_path: Path) -> None:
    command(tmp_path, "vcgencmd", '[ "$1" = get_throttled ] && echo throttled=0xE0000')
    flags = throttling(tmp_path)
    assert flags is not None and not flags.slowed and not flags.under_voltage


@pytest.mark.parametrize("script", ["exit 3", "echo throttled=0x0; exit 1", "echo VCHI failed"])
def test_a_command_that_fails_says_nothing(tmp_path: Path, script: str) -> None:
    command(tmp_path, "vcgencmd", script)
    assert throttling(tmp_path) is None


def test_a_command_that_cannot_run_says_nothing(tmp_path: Path) -> None:
    grow(tmp_path, {"usr/bin/vcgencmd": b"\x7fELF of another machine"})
    assert throttling(tmp_path) is None
    (tmp_path / "usr/bin/vcgencmd").chmod(0o755)
    assert throttling(tmp_path) is None


def test_an_empty_device_says_nothing(tmp_path: Path) -> None:
    assert temperature(tmp_path) is None
    assert throttling(tmp_path) is None


@pytest.mark.parametrize("noise", NOISE)
def test_noise_and_folders_in_place_of_files_say_nothing(tmp_path: Path, noise: str) -> None:
    grow(tmp_path, {"sys/class/thermal/thermal_zone0/temp": noise, PI_4: f"{noise}?"})
    (tmp_path / "sys/class/hwmon/hwmon0/temp1_input").mkdir(parents=True)
    assert temperature(tmp_path) is None
    assert throttling(tmp_path) is None
