"""Joules over a block: counters that wrap, power that is sampled, and honest absence."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tree import NOISE, command, grow
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.devices.energy import (
    Counter,
    CounterSource,
    EnergyMeter,
    PowerSource,
    counter_joules,
    energy_source,
    parse_pmic,
)

PMIC = """   3V7_WL_SW_A current(0)=0.10000000A
   3V3_SYS_A current(1)=0.20000000A
   VDD_CORE_A current(7)=3.00000000A
   3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
   VDD_CORE_V volt(15)=0.90000000V
   EXT5V_V volt(24)=5.15140000V
   BATT_V volt(25)=0.00000000V
"""
PMIC_WATTS = 0.1 * 3.7 + 0.2 * 3.3 + 3.0 * 0.9


class Clock:
    """Moves only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def rapl(
    zone: str, name: str, value: int | str, wraps: int = 262_143_328_850
) -> dict[str, str | bytes]:
    folder = f"sys/class/powercap/intel-rapl:{zone}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": f"{value}\n",
        f"{folder}/max_energy_range_uj": str(wraps),
    }


@given(
    st.integers(1_000, 2**40).flatmap(
        lambda wraps: st.tuples(
            st.just(wraps), st.integers(0, wraps - 1), st.integers(0, wraps - 1)
        )
    )
)
def test_a_counter_is_right_across_one_wrap(case: tuple[int, int, int]) -> None:
    wraps, start, grown = case
    before = {"a": Counter(start, wraps)}
    after = {"a": Counter((start + grown) % wraps, wraps)}
    assert counter_joules(before, after) == pytest.approx(grown / 1e6)


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.builds(Counter, st.integers(), st.none() | st.integers())
    ),
    st.dictionaries(
        st.sampled_from("abc"), st.builds(Counter, st.integers(), st.none() | st.integers())
    ),
)
def test_no_counters_give_negative_energy(
    before: dict[str, Counter], after: dict[str, Counter]
) -> None:
    joules = counter_joules(before, after)
    assert joules is None or joules >= 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"a": Counter(1)}),
        ({"a": Counter(1)}, {}),
        ({"a": Counter(5)}, {"a": Counter(1)}),
        ({"a": Counter(5, 4)}, {"a": Counter(1, 4)}),
    ],
    ids=["none before", "lost", "backwards", "above its own range"],
)
def test_counters_that_cannot_be_trusted(
    before: dict[str, Counter], after: dict[str, Counter]
) -> None:
    assert counter_joules(before, after) is None


@given(st.text(max_size=200) | st.just(PMIC).map(lambda text: text[: len(text) // 2]))
def test_any_text_is_power_or_none(text: str) -> None:
    watts = parse_pmic(text)
    assert watts is None or watts >= 0


def test_the_power_chip_of_a_pi_5() -> None:
    assert parse_pmic(PMIC) == pytest.approx(PMIC_WATTS)
    assert parse_pmic(PMIC.replace("current(7)=3.00000000A", "current(7)=3.0.0A")) == pytest.approx(
        PMIC_WATTS - 2.7
    )
    assert parse_pmic("EXT5V_V volt(24)=5.1V") is None
    assert parse_pmic(None) is None


def test_rapl_counts_packages_and_memory_but_no_part_twice(tmp_path: Path) -> None:
    grow(tmp_path, rapl("0", "package-0", 1_000_000) | rapl("0:0", "core", 10))
    grow(tmp_path, rapl("0:1", "dram", 500_000) | rapl("1", "package-1", 262_143_000_000))
    with EnergyMeter(tmp_path, clock=Clock()) as meter:
        grow(tmp_path, rapl("0", "package-0", 3_000_000) | rapl("0:0", "core", 99_000_000))
        grow(tmp_path, rapl("0:1", "dram", 750_000) | rapl("1", "package-1", 171_150))
    assert meter.reading is not None
    wrapped = (262_143_328_850 - 262_143_000_000 + 171_150) / 1e6
    assert meter.reading.joules == pytest.approx(2.0 + 0.25 + wrapped)
    assert (meter.reading.method, meter.reading.source) == ("counter", "rapl")


def test_a_counter_that_wraps_twice_is_right_with_looks_in_between(tmp_path: Path) -> None:
    grow(tmp_path, rapl("0", "package-0", 0, wraps=1_000_000))
    with EnergyMeter(tmp_path, clock=Clock()) as meter:
        for value in (600_000, 200_000, 800_000, 400_000):
            grow(tmp_path, rapl("0", "package-0", value, wraps=1_000_000))
            meter.sample()
    assert meter.reading is not None
    assert meter.reading.joules == pytest.approx(2.4)
    assert meter.reading.samples == 6


def test_monitors_that_count(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon1"
    grow(tmp_path, {f"{chip}/energy1_input": "1000000", f"{chip}/energy1_label": "Ecore000"})
    grow(tmp_path, {f"{chip}/energy2_input": "5000000", f"{chip}/energy2_label": "Esocket0"})
    with EnergyMeter(tmp_path) as meter:
        grow(tmp_path, {f"{chip}/energy1_input": "9000000", f"{chip}/energy2_input": "7000000"})
    assert meter.reading is not None
    assert meter.reading.joules == pytest.approx(2.0)
    assert (meter.reading.method, meter.reading.source) == ("counter", "hwmon")


def test_power_is_sampled_at_both_ends_and_says_so(tmp_path: Path) -> None:
    watts = "sys/class/hwmon/hwmon0/power1_input"
    grow(tmp_path, {watts: "2000000"})
    clock = Clock()
    with EnergyMeter(tmp_path, clock=clock) as meter:
        clock.now += 10
        grow(tmp_path, {watts: "4000000"})
    assert meter.reading is not None
    assert meter.reading.joules == pytest.approx(30.0)
    assert meter.reading.seconds == pytest.approx(10.0)
    assert (meter.reading.method, meter.reading.samples) == ("sampled", 2)


def test_looks_in_between_make_sampled_power_exact(tmp_path: Path) -> None:
    watts = "sys/class/hwmon/hwmon0/power1_input"
    grow(tmp_path, {watts: "1000000"})
    clock = Clock()
    with EnergyMeter(tmp_path, clock=clock) as meter:
        grow(tmp_path, {watts: "9000000"})
        meter.sample()
        clock.now += 10
        meter.sample()
        grow(tmp_path, {watts: "1000000"})
    assert meter.reading is not None
    assert meter.reading.joules == pytest.approx(90.0)


def test_a_channel_for_the_whole_board_stands_for_the_others(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon0"
    grow(tmp_path, {f"{chip}/power1_input": "6000000", f"{chip}/power1_label": "VDD_IN"})
    grow(tmp_path, {f"{chip}/power2_input": "2000000", f"{chip}/power2_label": "VDD_CPU"})
    source = energy_source(tmp_path)
    assert isinstance(source, PowerSource)
    assert source.read() == pytest.approx(6.0)


def test_a_pi_5_asks_its_power_chip(tmp_path: Path) -> None:
    (tmp_path / "pmic.txt").write_text(PMIC)
    command(tmp_path, "vcgencmd", f'[ "$1" = pmic_read_adc ] && cat "{tmp_path}/pmic.txt"')
    clock = Clock()
    with EnergyMeter(tmp_path, clock=clock) as meter:
        clock.now += 2
    assert meter.reading is not None
    assert meter.reading.source == "pmic"
    assert meter.reading.joules == pytest.approx(2 * PMIC_WATTS)


def test_counters_come_before_power(tmp_path: Path) -> None:
    grow(tmp_path, {"sys/class/hwmon/hwmon0/power1_input": "2000000"})
    assert isinstance(energy_source(tmp_path), PowerSource)
    grow(tmp_path, rapl("0", "package-0", 1))
    assert isinstance(energy_source(tmp_path), CounterSource)


def test_no_source_is_no_reading(tmp_path: Path) -> None:
    with EnergyMeter(tmp_path) as meter:
        meter.sample()
    assert meter.reading is None


def test_a_source_that_goes_away_is_no_reading(tmp_path: Path) -> None:
    files = rapl("0", "package-0", 5)
    grow(tmp_path, files)
    with EnergyMeter(tmp_path) as meter:
        for name in files:
            (tmp_path / name).unlink()
    assert meter.reading is None


def test_there_is_no_reading_before_the_block_ends(tmp_path: Path) -> None:
    grow(tmp_path, rapl("0", "package-0", 5))
    meter = EnergyMeter(tmp_path)
    assert meter.reading is None
    with meter:
        assert meter.reading is None


def test_an_exception_of_the_block_passes_and_the_block_is_measured(tmp_path: Path) -> None:
    grow(tmp_path, rapl("0", "package-0", 0))
    meter = EnergyMeter(tmp_path)
    with pytest.raises(RuntimeError, match="of the block"), meter:
        grow(tmp_path, rapl("0", "package-0", 1_000_000))
        raise RuntimeError("of the block")
    assert meter.reading is not None and meter.reading.joules == pytest.approx(1.0)


def test_a_meter_can_be_used_again(tmp_path: Path) -> None:
    grow(tmp_path, rapl("0", "package-0", 0))
    meter = EnergyMeter(tmp_path)
    for value in (1_000_000, 3_000_000):
        with meter:
            grow(tmp_path, rapl("0", "package-0", value))
    assert meter.reading is not None and meter.reading.joules == pytest.approx(2.0)


@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_no_source(tmp_path: Path, noise: str) -> None:
    grow(tmp_path, rapl("0", "package-0", noise))
    for name in ("power1_input", "energy1_input"):
        grow(tmp_path, {f"sys/class/hwmon/hwmon0/{name}": noise})
    command(tmp_path, "vcgencmd", "echo nonsense")
    assert energy_source(tmp_path) is None
