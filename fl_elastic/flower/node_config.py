"""Configuration of a node of a fleet, and when it refuses to train: low battery, or no mains power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_elastic.devices.power import PowerSupply
from fl_elastic.errors import FleetError


@dataclass(frozen=True)
class NodeConfig:
    """Configuration of a node; none of it comes from the server.

    Parameters
    ----------
    partition : int
        Index of the node's partition of the data, if data are split into numbered partitions.
    state_dir : Path
        Folder for what is kept between messages.
    data_root : str, optional
        Folder of the datasets.
    name : str
        Name for logs.
    threads : int
        Number of torch threads; 0 for the number that was measured to be fastest.
    speedup, deadline : float, optional
        The device's own budget for a round; with both, the tighter limit holds.
    least_battery : float
        Charge, from 0 to 1, below which the device takes no part in a round; 0 for no limit.
    mains_only : bool
        Whether the device takes part only on mains power; if its power supply is unknown, it takes part.
    stream_dir : Path, optional
        State folder of a stream learner on this device, whose samples replace other data.
    joining : str
        How the global model is joined with that learner's model, as in `StreamClient`.
    """

    partition: int
    state_dir: Path
    data_root: str | None = None
    name: str = ""
    threads: int = 0
    speedup: float | None = None
    deadline: float | None = None
    least_battery: float = 0.0
    mains_only: bool = False
    stream_dir: Path | None = None
    joining: str = "measured"

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> NodeConfig:
        """Read Flower's node config.

        Raises
        ------
        FleetError
            If a setting is missing or invalid.
        """
        state, stream = (str(node_config.get(key, "")) for key in ("state-dir", "stream-state-dir"))
        if not state:
            raise FleetError("node config lacks 'state-dir', the folder for state between messages")
        return cls(
            partition=int(_number(node_config, "partition-id", 0.0, lowest=0) or 0),
            state_dir=Path(state),
            data_root=str(node_config.get("data-root", "")) or None,
            name=str(node_config.get("node-name", "")),
            threads=int(_number(node_config, "threads", 0.0, lowest=0) or 0),
            speedup=_number(node_config, "speedup", None, lowest=1),
            deadline=_number(node_config, "deadline", None, lowest=1e-9),
            least_battery=_number(node_config, "least-battery", 0.0, lowest=0) or 0.0,
            mains_only=bool(node_config.get("mains-only", False)),
            stream_dir=Path(stream) if stream else None,
            joining=str(node_config.get("joining", "measured")),
        )

    def refusal(self, supply: PowerSupply) -> str:
        """Return why the node takes no part with this power supply; empty if it takes part.

        >>> settings = NodeConfig(0, Path("state"), least_battery=0.3)
        >>> settings.refusal(PowerSupply(on_mains=False, battery=0.2))
        'the battery is at 20 %, its least is 30 %'
        >>> settings.refusal(PowerSupply(on_mains=True, battery=0.2))
        ''
        """
        if supply.on_mains is not False:
            return ""
        if self.mains_only:
            return "the device is not on mains power"
        if supply.battery is not None and supply.battery < self.least_battery:
            return f"the battery is at {supply.battery:.0%}, its least is {self.least_battery:.0%}".replace(
                "%", " %"
            )
        return ""


def _number(
    config: Mapping[str, Any], key: str, default: float | None, lowest: float
) -> float | None:
    value = config.get(key, default)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < lowest:
        raise FleetError(f"node config {key} = {value!r} is not a number of at least {lowest:g}")
    return float(value)
