"""Flower's own processes for tests: a private home and ports, and an end for everything that was started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any


def binary(name: str) -> str:
    """Path of a command of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def environment(home: Path, **changes: str) -> dict[str, str]:
    """A home of its own, nothing that reaches outside, no proxy before the loopback."""
    home.mkdir(parents=True, exist_ok=True)
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return kept | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    } | changes  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listening(port: int) -> bool:
    """Whether a SuperLink answers there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20, every: float = 0.1) -> bool:
    """Whether the condition came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def status_of(run_id: str, superlink: tuple[str, ...], env: dict[str, str], cwd: Path) -> str:
    """What Flower says of a run: its status and sub-status."""
    command = [binary("flwr"), "ls", *superlink, "--run-id", run_id, "--format", "json"]
    listed = subprocess.run(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(listed.stdout)
    return str(found["runs"][0]["status"])


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and command line of every process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError, IndexError):
            continue
        found[int(folder.name)] = (parent, line)
    return found


def superlink_of(port: int) -> list[int]:
    """The SuperLink that was started with this port; a list, because it may not have come up."""
    return [
        pid
        for pid, (_, line) in _processes().items()
        if "flower-superlink" in line and f" {port} " in f"{line} "
    ]


def with_all_below(*pids: int) -> list[int]:
    """These processes and those that they started, which a killed parent leaves behind."""
    processes, found, waiting = _processes(), [], list(pids)
    while waiting:
        found.append(waiting.pop())
        waiting += [other for other, (parent, _) in processes.items() if parent == found[-1]]
    return found


def end(pids: list[int]) -> None:
    """Kill exactly these."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
