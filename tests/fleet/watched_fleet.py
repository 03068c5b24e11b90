"""A real fleet whose processes are ended, started again and waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fl_elastic.fleet.flower_cli import RunState
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.local import LocalFleet
from fl_elastic.fleet.member import Member, end_members
from fl_elastic.fleet.submit import wait_for_run

QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


class WatchedFleet(LocalFleet):
    """Waits for nodes that were ended until the server has heard of their new process."""

    def __init__(
        self,
        nodes: int,
        folder: Path | None = None,
        *,
        environment: Mapping[str, str] = QUICK,
        **settings: Any,
    ) -> None:
        super().__init__(nodes, folder, environment=environment, **settings)
        self._started: dict[str, datetime] = {}

    def start(self, name: str) -> Member:
        """Note when it was started; one that is running is left alone."""
        if name not in self.members or not self.members[name].running:
            self._started[name] = datetime.now(UTC).replace(microsecond=0)
        return super().start(name)

    def kill(self, name: str) -> None:
        """Kill a process and everything it started at once (SIGKILL), as a power cut does."""
        end_members([self.members[name]], grace=0)

    def stop(self, name: str) -> None:
        """End a process in an orderly way (SIGTERM)."""
        end_members([self.members[name]])

    def wait(self, run_id: str, **how: float) -> RunState:
        """Wait until a run has ended; see `wait_for_run`."""
        return wait_for_run(self.flower, run_id, lambda text: None, **how)  # type: ignore[arg-type]

    def wait_back(self, names: Sequence[str], seconds: float = 120.0) -> None:
        """Wait until the present processes of these nodes are online, and start again those that end.

        The server refuses a node that was killed for about a minute.
        """
        until = time.monotonic() + seconds
        while not all(self.members[name].running and self._is_back(name) for name in names):
            assert time.monotonic() < until, f"not all of {names} within {seconds:.0f} s"
            for name in names:
                self.start(name)
            time.sleep(3.0)

    def _is_back(self, name: str) -> bool:
        ids = {node.node_id: node.name for node in load_inventory(self.folder.inventory).nodes}
        return any(
            ids.get(state.node_id) == name
            and state.status == "online"
            and datetime.fromisoformat(state.online_at or "1970-01-01T00:00Z")
            >= self._started[name]
            for state in self.flower.nodes()
        )
