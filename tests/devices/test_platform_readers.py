"""Memory, processors and disk, from made-up trees and from this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from device_tree import NOISE, grow
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.devices.platform import (
    GroupLimits,
    Processors,
    disk_free_bytes,
    group_limits,
    memory,
    parse_cpu_max,
    parse_membership,
    parse_meminfo,
    processors,
)
from fl_elastic.devices.platform_files import integer

GIB = 1 << 30
MEMINFO = """MemTotal:        8247784 kB
MemFree:          412356 kB
MemAvailable:    6291456 kB
SwapTotal:       2097148 kB
SwapFree:        1048576 kB
HugePages_Total:       0
"""
SERVICE = "0::/system.slice/fl-elastic-node.service"
FOLDER = "sys/fs/cgroup/system.slice/fl-elastic-node.service"


@pytest.mark.slow
@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    assert all(value >= 0 for value in parse_meminfo(text).values())
    group = parse_membership(text)
    assert group is None or group.is_absolute()
    share = parse_cpu_max(text)
    assert share is None or share > 0
    value = integer(text)
    assert value is None or int(text.strip()) == value


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_quota_is_a_share(quota: int, period: int) -> None:
    assert parse_cpu_max(f"{quota} {period}") == pytest.approx(quota / period)
    assert parse_cpu_max(f"max {period}") is None


@given(st.integers(1, 256), st.none() | st.floats(0.01, 1000))
def test_threads_never_exceed_what_is_allowed(allowed: int, quota: float | None) -> None:
    threads = Processors(allowed, quota).threads
    assert 1 <= threads <= allowed
    assert quota is None or threads < quota + 1


def test_memory_of_a_board(tmp_path: Path) -> None:
    found = memory(grow(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found.total_bytes == 8247784 * 1024
    assert found.available_bytes == 6 * GIB
    assert found.swap_total_bytes == 2097148 * 1024


def test_a_service_has_the_least_of_all_limits_above_it(tmp_path: Path) -> None:
    grow(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": SERVICE})
    grow(tmp_path, {f"{FOLDER}/memory.max": str(2 * GIB), f"{FOLDER}/memory.high": str(GIB)})
    grow(tmp_path, {f"{FOLDER}/memory.current": str(GIB // 2), f"{FOLDER}/cpu.max": "max 100000"})
    grow(tmp_path, {f"{FOLDER}/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n"})
    slice_ = "sys/fs/cgroup/system.slice"
    grow(tmp_path, {f"{slice_}/memory.max": "max", f"{slice_}/cpu.max": "150000 100000"})
    limits = group_limits(tmp_path)
    assert limits == GroupLimits(GIB, GIB - GIB // 4, 1.5)
    found = memory(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (GIB, GIB - GIB // 4)
    assert processors(tmp_path).threads <= 2


def test_a_container_sees_its_own_limits_at_the_mount(tmp_path: Path) -> None:
    grow(tmp_path, {"proc/self/cgroup": "0::/../../kubepods/x\n", "proc/meminfo": MEMINFO})
    grow(tmp_path, {"sys/fs/cgroup/memory.max": str(GIB)})
    assert group_limits(tmp_path).memory_bytes is None, (
        "a path that leaves the mount is not followed"
    )
    grow(tmp_path, {"proc/self/cgroup": "0::/docker/abc\n"})
    assert group_limits(tmp_path).memory_bytes == GIB
    assert memory(tmp_path).available_bytes == 6 * GIB


def test_an_empty_device_says_nothing(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == GroupLimits(None, None, None)
    assert memory(tmp_path).total_bytes is None


@pytest.mark.parametrize("noise", NOISE)
def test_noise_says_nothing(tmp_path: Path, noise: str) -> None:
    grow(tmp_path, {"proc/meminfo": noise, "proc/self/cgroup": SERVICE})
    for name in ("memory.max", "memory.high", "memory.current", "memory.stat", "cpu.max"):
        grow(tmp_path, {f"{FOLDER}/{name}": noise})
    assert memory(tmp_path).total_bytes is None
    assert group_limits(tmp_path).memory_bytes is None


def test_free_space_where_a_folder_will_be(tmp_path: Path) -> None:
    here = disk_free_bytes(tmp_path)
    assert here is not None and here > 0
    later = disk_free_bytes(tmp_path / "not" / "there" / "yet")
    assert later is not None and abs(later - here) < GIB
    assert disk_free_bytes("\0") is None


def test_this_machine() -> None:
    found = memory()
    assert found.total_bytes is not None and found.available_bytes is not None
    assert 0 < found.available_bytes <= found.total_bytes
    assert processors().allowed == len(os.sched_getaffinity(0))
