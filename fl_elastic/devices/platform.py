"""Processors, memory and disk that are really available to a process."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fl_elastic.devices.platform_cgroup import group_limits
from fl_elastic.devices.platform_files import HERE, text_in

__all__ = [
    "Memory",
    "Processors",
    "disk_free_bytes",
    "memory",
    "parse_meminfo",
    "processors",
]

_LINE = re.compile(r"([A-Za-z0-9_()]+):\s+([0-9]{1,18})(?: (kB))?\s*")


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; None if the platform does not report it.

    Parameters
    ----------
    total_bytes : int or None
        Most memory that this process could ever get.
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


def _smaller(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


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
        total_bytes=_smaller(amounts.get("MemTotal"), limits.memory_bytes),
        available_bytes=_smaller(free, limits.memory_free_bytes),
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
    """Return the free bytes for this user on the disk of ``path``, which may not exist yet; None if unknown.

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
