"""Limits that a service manager or a container sets for this process: Linux control groups, version 2.

A group is bound by its own limit and by that of every group above it, so all of them are read. In a
container, the path in ``/proc/self/cgroup`` may not exist under the mount; then only the limits of the mount
itself are read, which are the container's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fl_elastic.devices.platform_files import HERE, integer, text_in

__all__ = ["GroupLimits", "group_limits", "parse_cpu_max", "parse_membership"]


@dataclass(frozen=True)
class GroupLimits:
    """Limits from the control groups of this process; None without a limit.

    Parameters
    ----------
    memory_bytes : int or None
        Most memory: the smaller of the hard limit and the limit above which the process is throttled.
    memory_free_bytes : int or None
        Unused part of it. Files that the kernel can drop count as free.
    cpus : float or None
        Processor time per second, in processors.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    cpus: float | None = None


def parse_membership(text: str) -> PurePosixPath | None:
    r"""Return the group of this process from ``/proc/self/cgroup``; None if there is none.

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
    """Return the processor time, in processors, from version 2's ``cpu.max``; None for no limit.

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
    """Return the bytes of recently unused files, from ``memory.stat``."""
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
