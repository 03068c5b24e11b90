"""Record of each message to a fleet of unequal devices, and a table of all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from fl_elastic.state.files import write_atomically


@dataclass(frozen=True)
class Row:
    """Record of one message.

    Parameters
    ----------
    server_round : int
        Round from the message's config; 0 if it has none.
    message_type : str
        Type of the message.
    node, client : int
        Flower's number of the node, and the number of its client in the fleet.
    device : str
        Class of the device.
    outcome : str
        One of `clock.Outcome`.
    sent, arrival : float
        Simulated seconds since the start when the message was sent, and when the server heard or would have heard.
    downlink_seconds, compute_seconds, uplink_seconds : float
        Seconds of the message's parts on the device.
    downlink_bytes, uplink_bytes, peak_bytes : float
        Bytes of the message, of its reply, and of the memory for handling it.
    host : str
        Machine and process that handled and measured it; empty if none did.
    """

    server_round: int
    message_type: str
    node: int
    client: int
    device: str
    outcome: str
    sent: float
    arrival: float
    downlink_seconds: float
    compute_seconds: float
    uplink_seconds: float
    downlink_bytes: float
    uplink_bytes: float
    peak_bytes: float
    host: str


def save_rows(rows: Iterable[Row], path: str | Path) -> Path:
    """Write rows as a CSV file; return its path."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(field.name for field in fields(Row))
    table.writerows(astuple(row) for row in rows)
    return write_atomically(Path(path), text.getvalue().encode())
