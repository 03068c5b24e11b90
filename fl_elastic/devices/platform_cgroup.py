"""Limits that a service manager or a container puts on this process: Linux control groups v1 and v2.

A group is bound by its own limit and by that of every group above it, so all of them are read. In a
container the path in ``/proc/self/cgroup`` may not exist under the mount; then only the mount's own
limits are seen, which are the container's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fl_elastic.devices.platform_files import HERE, integer, text_in

__all__ = ["GroupLimits", "group_limits", "parse_cpu_max", "parse_membership"]

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63, rounded down to whole pages."""


@dataclass(frozen=True)
class GroupLimits:
    """What the control groups of this process allow; None where they set no limit.

    Parameters
    ----------
    memory_bytes : int or None
        Most memory, the smaller of the hard limit and of the one that slows down.
    memory_free_bytes : int or None
        What is left of it. Files that the kernel can drop again count as free.
    cpus : float or None
        Processors' worth of time.
    """

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    cpus: float | None = None


def parse_membership(text: str) -> dict[str, PurePosixPath]:
    r"""Return the group of this process per controller from ``/proc/self/cgroup``; "" is version 2.

    Examples
    --------
    >>> parse_membership("5:cpu,cpuacct:/a\n0::/system.slice/x.service")
    {'cpu': PurePosixPath('/a'), 'cpuacct': PurePosixPath('/a'),
    '': PurePosixPath('/system.slice/x.service')}
    """
    found: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        parts = line.strip().split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/") and ".." not in parts[2].split("/"):
            for controller in parts[1].split(","):
                found[controller] = PurePosixPath(parts[2])
    return found


def parse_cpu_max(text: str | None) -> float | None:
    """Return the processors' worth of time in version 2's ``cpu.max``, or None for no limit.

    Examples
    --------
    >>> parse_cpu_max("150000 100000"), parse_cpu_max("max 100000")
    (1.5, None)
    """
    parts = (text or "").split()
    return _share(integer(parts[0]), integer(parts[1])) if len(parts) == 2 else None


def _share(quota: int | None, period: int | None) -> float | None:
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _upwards(mount: Path, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folder of a group and of those above it, up to the mount."""
    for path in (group, *group.parents):
        yield mount.joinpath(*path.parts[1:])


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _bytes(path: Path) -> int | None:
    """Return a limit in bytes; "max" and the huge number of version 1 are none."""
    value = integer(text_in(path))
    return value if value is not None and 0 < value < _UNLIMITED_BYTES else None


def _droppable(text: str | None) -> int:
    """Return the bytes of files that nobody used lately, from ``memory.stat``."""
    amounts = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        amounts[name] = max(0, integer(value) or 0)
    # Version 1 counts the groups below in the entry with "total_".
    return amounts.get("total_inactive_file", amounts.get("inactive_file", 0))


def _memory_of(folder: Path, limits: tuple[str, ...], used: str) -> tuple[int | None, int | None]:
    limit = _least([_bytes(folder / name) for name in limits])
    usage = integer(text_in(folder / used))
    if limit is None or usage is None:
        return limit, None
    held = max(0, usage - _droppable(text_in(folder / "memory.stat")))
    return limit, max(0, limit - held)


def group_limits(root: Path = HERE) -> GroupLimits:
    """Return the limits that bind this process, of either version of control groups.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are found.

    Examples
    --------
    >>> group_limits(Path("/nowhere"))
    GroupLimits(memory_bytes=None, memory_free_bytes=None, cpus=None)
    """
    member = parse_membership(text_in(root / "proc/self/cgroup") or "")
    mount = root / "sys/fs/cgroup"
    memory: list[tuple[int | None, int | None]] = []
    cpus: list[float | None] = []
    if "" in member:
        for folder in _upwards(mount, member[""]):
            memory.append(_memory_of(folder, ("memory.max", "memory.high"), "memory.current"))
            cpus.append(parse_cpu_max(text_in(folder / "cpu.max")))
    for folder in _upwards(mount / "memory", member["memory"]) if "memory" in member else ():
        memory.append(_memory_of(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes"))
    for folder in _upwards(mount / "cpu", member["cpu"]) if "cpu" in member else ():
        quota = integer(text_in(folder / "cpu.cfs_quota_us"))
        cpus.append(_share(quota, integer(text_in(folder / "cpu.cfs_period_us"))))
    return GroupLimits(
        memory_bytes=_least([limit for limit, _ in memory]),
        memory_free_bytes=_least([free for _, free in memory]),
        cpus=min((share for share in cpus if share is not None), default=None),
    )
