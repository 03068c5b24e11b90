"""Checks that this machine is fit for a node or a server: torch, memory, disk, heat."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fl_elastic.devices.platform import Memory
from fl_elastic.devices.vitals import Throttling
from fl_elastic.fleet.doctor.finding import Finding, fail, ok, skipped, warn

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class TorchBuild:
    """Facts about the installed torch, read from its files without importing it.

    Parameters
    ----------
    version : str
        Installed version.
    cuda : str, optional
        Version of CUDA for which it was built; ``None`` for a build without CUDA.
    """

    version: str
    cuda: str | None


def check_torch(build: TorchBuild | None, machine: str) -> Finding:
    """Check whether torch is installed, in a build for this hardware."""
    if build is None:
        return fail("torch", "not installed", "python -m pip install 'torch>=2.6'")
    seen = f"{build.version}, {'CUDA ' + build.cuda if build.cuda else 'CPU only'}"
    if build.cuda and machine == "aarch64":
        return warn(
            "torch", seen,
            "on a board without such a GPU it wastes gigabytes: install torch==2.10.* with the "
            "constraints of deploy/constraints/aarch64.txt",
        )  # fmt: skip
    return ok("torch", seen)


def check_memory(memory: Memory) -> Finding:
    """Check whether there is memory for Flower's processes (270 MB) and for training."""
    if memory.available_bytes is None:
        return skipped("memory", "not available on this platform")
    seen = f"{memory.available_bytes / _MIB:,.0f} MiB free"
    if memory.available_bytes < 350 * _MIB:
        return fail("memory", seen, "end other programs, or add swap: a node needs about 700 MiB")
    if memory.available_bytes < 700 * _MIB:
        return warn("memory", seen, "it will swap while training; end other programs, or add swap")
    return ok("memory", seen)


def check_swap(memory: Memory) -> Finding:
    """Check whether a small board has swap, so that a peak of memory takes time instead of ending the process."""
    if memory.total_bytes is None or memory.swap_total_bytes is None:
        return skipped("swap", "not available on this platform")
    swap = memory.swap_total_bytes
    seen = f"{swap / _MIB:,.0f} MiB beside {memory.total_bytes / _GIB:.1f} GiB of memory"
    if memory.total_bytes < 2 * _GIB and swap < 512 * _MIB:
        return warn(
            "swap", seen, "give this small board 1 GiB of zram or a swap file (docs/deploy.md)"
        )
    return ok("swap", seen)


def check_disk(free_bytes: int | None, place: Path) -> Finding:
    """Check whether there is disk space for the state of a node or server."""
    name = "disk"
    if free_bytes is None:
        return skipped(name, f"nothing to see at {place}")
    seen = f"{free_bytes / _GIB:.1f} GiB free at {place}"
    if free_bytes < 200 * _MIB:
        return fail(name, seen, "delete old results and logs, or choose another state folder")
    if free_bytes < _GIB:
        return warn(name, seen, "make room before checkpoints and logs fill it")
    return ok(name, seen)


def check_heat(now: Throttling | None) -> Finding:
    """Check whether the board throttles its processor."""
    if now is None:
        return skipped("heat and power", "not available on this platform")
    if now.under_voltage:
        return warn(
            "heat and power", "under-voltage", "use the maker's power supply and a short cable"
        )
    if now.slowed:
        return warn("heat and power", "slowed down", "give it a heat sink, a fan, or less sun")
    return ok("heat and power", "not slowed down")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_build(version: str | None = None, origin: Path | None = None) -> TorchBuild | None:
    """Return the installed torch without importing it, which takes seconds on a small board; None if missing.

    Parameters
    ----------
    version : str, optional
        Version of the distribution; looked up by default.
    origin : Path, optional
        Torch's ``version.py``; looked up by default.
    """
    version = installed_version("torch") if version is None else version
    if origin is None:
        spec = importlib.util.find_spec("torch")
        origin = (
            None
            if spec is None or spec.origin is None
            else Path(spec.origin).with_name("version.py")
        )
    if version is None or origin is None:
        return None
    try:
        found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", origin.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return TorchBuild(version, found.group(1) if found else None)
