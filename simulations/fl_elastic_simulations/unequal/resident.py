"""Memory that this process holds now, and the most that it has held."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process in bytes; without /proc the peak by getrusage."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def set_back_peak() -> bool:
    """Release free memory and reset the peak of the resident set to the present; return whether that worked."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
