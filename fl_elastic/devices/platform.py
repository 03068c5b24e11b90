"""Processors, memory and disk available to a process, within the limits of its Linux control groups (version 2).

A group is bound by its own limit and by those of all groups above it, so all are read. In a container the path in
``/proc/self/cgroup`` may not exist under the mount; then only the limits of the mount itself are read, which are
those of the container.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fl_elastic.devices.platform_files import HERE, integer, text_in

_LINE = re.compile(r"([A-Za-z0-9_()]+):\s+([0-9]{1,18})(?: (kB))?\s*")


@dataclass(frozen=True)
class GroupLimits:
    """Limits from the control groups of this process; None without a limit.

    Parameters
    ----------
    memory_bytes : int or None
        Memory limit: the smaller of the hard limit and the limit above which the process is throttled.
    memory_free_bytes : int or None
        Unused part of ``memory_bytes``. Cached files that the kernel can drop count as unused.
    cpus : float or None
        Processor time per second, in processors.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    cpus: float | None = None


def parse_membership(text: str) -> PurePosixPath | None:
    r"""Return the control group of this process from the text of ``/proc/self/cgroup``; None if it has none.

    Examples
    --------
    >>> parse_membership("5:cpu,cpuacct:/a\n0::/system.slice/x.service")
    PurePosixPath('/system.slice/x.service')
    """
    for line in text.splitlines():
        group = line.strip().removeprefix("0::")
        if group != line.strip() and group.startswith("/") and ".." not in group.split("/"):
            return PurePosixPath(group)
    return None


def parse_cpu_max(text: str | None) -> float | None:
    """Return the limit on processor time, in processors, from the text of ``cpu.max``; None for no limit.

    Examples
    --------
    >>> parse_cpu_max("150000 100000"), parse_cpu_max("max 100000")
    (1.5, None)
    """
    parts = [integer(part) or 0 for part in (text or "").split()]
    return parts[0] / parts[1] if len(parts) == 2 and min(parts) > 0 else None


def _upwards(mount: Path, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folders of a group and of those above it, up to the mount."""
    for path in (group, *group.parents):
        yield mount.joinpath(*path.parts[1:])


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _bytes(path: Path) -> int | None:
    """Return a limit in bytes; None for "max"."""
    value = integer(text_in(path))
    return value if value is not None and value > 0 else None


def _droppable(text: str | None) -> int:
    """Return the bytes of cached files that were not used recently, from the text of ``memory.stat``."""
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return max(0, integer(value) or 0)
    return 0


def _memory_of(folder: Path) -> tuple[int | None, int | None]:
    limit = _least([_bytes(folder / name) for name in ("memory.max", "memory.high")])
    usage = integer(text_in(folder / "memory.current"))
    if limit is None or usage is None:
        return limit, None
    held = max(0, usage - _droppable(text_in(folder / "memory.stat")))
    return limit, max(0, limit - held)


def group_limits(root: Path = HERE) -> GroupLimits:
    """Return the limits that apply to this process.

    Parameters
    ----------
    root : Path
        Folder that contains ``proc`` and ``sys``.

    Examples
    --------
    >>> group_limits(Path("/nowhere"))
    GroupLimits(memory_bytes=None, memory_free_bytes=None, cpus=None)
    """
    group = parse_membership(text_in(root / "proc/self/cgroup") or "")
    folders = [] if group is None else list(_upwards(root / "sys/fs/cgroup", group))
    memory = [_memory_of(folder) for folder in folders]
    cpus = [parse_cpu_max(text_in(folder / "cpu.max")) for folder in folders]
    return GroupLimits(
        memory_bytes=_least([limit for limit, _ in memory]),
        memory_free_bytes=_least([free for _, free in memory]),
        cpus=min((share for share in cpus if share is not None), default=None),
    )


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; None if the platform does not report it.

    Parameters
    ----------
    total_bytes : int or None
        Largest amount of memory that this process can get.
    available_bytes : int or None
        Memory that it could get now without swapping.
    swap_total_bytes : int or None
        Swap of the machine, zram included.
    """

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None


def parse_meminfo(text: str) -> dict[str, int]:
    r"""Return the amounts in ``/proc/meminfo`` in bytes; lines that cannot be read are left out.

    Examples
    --------
    >>> parse_meminfo("MemTotal:  1000 kB\nHugePages_Total:  2\nnonsense")
    {'MemTotal': 1024000, 'HugePages_Total': 2}
    """
    found = (_LINE.fullmatch(line.strip()) for line in text.splitlines())
    return {line[1]: int(line[2]) * (1024 if line[3] else 1) for line in found if line}


def memory(root: Path = HERE) -> Memory:
    """Return the memory that this process may use, limited by its control group.

    Parameters
    ----------
    root : Path
        Folder that contains ``proc`` and ``sys``.

    Examples
    --------
    >>> memory(Path("/nowhere")).total_bytes is None
    True
    """
    amounts = parse_meminfo(text_in(root / "proc/meminfo") or "")
    limits = group_limits(root)
    free = amounts.get("MemAvailable", amounts.get("MemFree"))
    return Memory(
        total_bytes=_least([amounts.get("MemTotal"), limits.memory_bytes]),
        available_bytes=_least([free, limits.memory_free_bytes]),
        swap_total_bytes=amounts.get("SwapTotal"),
    )


@dataclass(frozen=True)
class Processors:
    """The processors that this process may use.

    Parameters
    ----------
    allowed : int
        Number of processors on which the scheduler may run it.
    quota : float or None
        Processor time per second that its control group grants, in processors; None without a limit.

    Examples
    --------
    >>> Processors(allowed=4, quota=1.5).threads
    2
    """

    allowed: int
    quota: float | None

    @property
    def threads(self) -> int:
        """Number of threads that can run at the same time; the last one may have only part of a processor."""
        if self.quota is None:
            return self.allowed
        return max(1, min(self.allowed, math.ceil(self.quota)))


def disk_free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Return the bytes free for this user on the disk of ``path``; None if unknown. The path may not exist yet.

    Examples
    --------
    >>> disk_free_bytes("/no/such/folder/yet") == disk_free_bytes("/")
    True
    """
    folder = Path(path).absolute()
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None


def processors(root: Path = HERE) -> Processors:
    """Return the processors that this process may use.

    Examples
    --------
    >>> processors().threads >= 1
    True
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        # Not available on macOS.
        allowed = os.cpu_count() or 1
    return Processors(allowed=max(1, allowed), quota=group_limits(root).cpus)
