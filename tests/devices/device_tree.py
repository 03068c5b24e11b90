"""A made-up tree of files, in place of the one of a device."""

from __future__ import annotations

from pathlib import Path

NOISE = (
    "",
    "\0",
    "n/a",
    "-",
    "nan",
    "1e400",
    "9" * 5000,
    "\ufffd\ufffd",
    "0x",
    ":::",
    "12 34\n\n5",
)
"""What a damaged or unwilling file may hold."""


def grow(root: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below ``root``; returns it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def command(root: Path, name: str, script: str) -> None:
    """Make a command of the device that runs these lines of shell."""
    path = root / "usr/bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
