"""Write what boards install, package by package, with the digest of every file.

``python deploy/locks/lock.py`` asks the registry through pip for wheels of 64-bit ARM, for the Pythons of Debian 12
and 13, by the constraints of the same name. Run it to take newer releases, look at the difference, and try it on an
emulated board (``make test-aarch64``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("311", "313")
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (28, 26, 24, 17)] + [
    "manylinux2014_aarch64"
]
# Needs of the library with its extras fleet and vision; those of torch by name, as pip asks after this machine's.
NEEDS = [
    "flwr", "numpy", "pydantic>=2.9", "prometheus-client>=0.20", "safetensors>=0.4", "filelock",
    "fsspec>=0.8.5", "jinja2", "networkx", "pillow", "setuptools", "sympy>=1.13.3", "typing-extensions",
]  # fmt: skip


def found(constraints: Path, python: str, names: list[str], *more: str) -> list[tuple[str, str]]:
    """Return ``name==version`` and digest of what pip would install."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        platforms = [option for each in PLATFORMS for option in ("--platform", each)]
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                "--only-binary=:all:", "--target", place, "--report", str(report), *platforms,
                "--python-version", python, "--implementation", "cp", "--constraint", str(constraints),
                *more, *names,
            ],
            check=True,
        )  # fmt: skip
        installed = json.loads(report.read_text())["install"]
    return [
        (
            f"{each['metadata']['name']}=={each['metadata']['version']}",
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in installed
    ]


def main() -> None:
    """Write a lock beside this file for each constraints of boards."""
    for constraints in sorted((HERE.parent / "constraints").glob("aarch64*.txt")):
        digests: dict[str, set[str]] = {}
        for python in PYTHONS:
            pairs = found(constraints, python, NEEDS)
            pairs += found(constraints, python, ["torch", "torchvision"], "--no-deps")
            for name, digest in pairs:
                digests.setdefault(name, set()).add(digest)
        lines = [
            "# Written by deploy/locks/lock.py: what a board installs, with the digest of every file.",
            "# python -m pip install --require-hashes --no-deps --only-binary=:all: --requirement THIS_FILE",
        ]
        for name in sorted(digests, key=str.lower):
            hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests[name])]
            lines.append(" \\\n".join([name, *hashes]))
        (HERE / constraints.name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
