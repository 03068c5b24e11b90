"""A Flower mod that measures the handling of a message, from which `UnequalGrid` computes simulated time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.tasks.task import DEADLINE
from fl_elastic_simulations.unequal.resident import resident_bytes, set_back_peak

RECORD = "fl_elastic.unequal"
"""Key of the record with the grid's request and the node's answer; app and strategy do not see it."""

_PARTITION = "partition-id"
_WHO = "who"
# A passed deadline leaves next to nothing, and the client reports that.
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Figures:
    """Figures that a node gets about the device that it plays.

    Parameters
    ----------
    device : str
        Class of the device.
    slowdown : float
        Slowdown relative to the reference host.
    memory : float
        Bytes that handling a message may take; 0 for no limit.
    bandwidth : float
        Bytes per second of its uplink.
    downlink_seconds : float
        Seconds that receiving this message took on the device.
    """

    device: str
    slowdown: float
    memory: float
    bandwidth: float
    downlink_seconds: float

    def as_record(self) -> ConfigRecord:
        """Return the figures as a record to send."""
        return ConfigRecord(asdict(self))


@dataclass(frozen=True)
class Measured:
    """A node's measurements for a message that it has handled.

    Parameters
    ----------
    seconds : float
        CPU time of the process over all its threads, which is the time of one core. It includes neither waiting nor
        processes that the app starts, such as the workers of a data loader.
    peak_bytes : float
        Growth of the resident set at its peak; negative if the host does not report it.
    host : str
        Machine and process that measured.
    """

    seconds: float
    peak_bytes: float
    host: str

    @classmethod
    def of(cls, reply: Message) -> Measured | None:
        """Remove and return the measurements in a reply; None if there are none."""
        record = reply.content.pop(RECORD, None)
        if not isinstance(record, ConfigRecord):
            return None
        seconds, peak = (float(cast(float, record[name])) for name in ("seconds", "peak_bytes"))
        return cls(seconds, peak, str(record["host"]))


def who_record() -> RecordDict:
    """Return the content of a message that asks a node for its partition."""
    return RecordDict({RECORD: ConfigRecord({_WHO: True})})


def measuring_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Measure the handling of a message if an `UnequalGrid` asks for it.

    Put it first in the list of an app's mods, so that it also measures the others. While the app handles a message,
    ``context.node_config`` describes the simulated device, unless the node's own config does: ``device`` (its
    class), ``slowdown``, ``memory`` in bytes if it is limited, and ``bandwidth`` to the server.

    An app computes in seconds of this host, which is ``slowdown`` times faster than the device. So the device's
    bandwidth is multiplied by ``slowdown``, and a deadline of fl_elastic's server is divided by it, after the time
    of receiving the message is subtracted.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[measuring_mod])
    """
    asked = message.content.pop(RECORD, None)
    if not isinstance(asked, ConfigRecord):
        return call_next(message, context)
    if _WHO in asked:
        return Message(RecordDict({RECORD: _who(context)}), reply_to=message)
    figures = Figures(**cast(dict[str, float], dict(asked)))  # type: ignore[arg-type]
    _in_host_seconds(message.content, figures)
    permitted = set_back_peak()
    before = resident_bytes("VmRSS")
    with _known(context, figures):
        began = time.process_time()
        reply = call_next(message, context)
        seconds = time.process_time() - began
    if not reply.has_error():
        grown = max(resident_bytes("VmHWM") - before, 0) if permitted else -1
        measured = Measured(seconds, float(grown), f"{platform.node()}/{os.getpid()}")
        reply.content[RECORD] = ConfigRecord(asdict(measured))
    return reply


def _who(context: Context) -> ConfigRecord:
    if _PARTITION not in context.node_config:
        raise ScenarioError(
            f"the config of node {context.node_id} lacks {_PARTITION!r}, the number of its device in the fleet"
        )
    return ConfigRecord({_PARTITION: int(cast(int, context.node_config[_PARTITION]))})


@contextmanager
def _known(context: Context, figures: Figures) -> Iterator[None]:
    """Within this context, tell the app its device; entries of the node's own config are kept."""
    mine = {
        name: value for name, value in _shown(figures).items() if name not in context.node_config
    }
    context.node_config.update(mine)
    try:
        yield
    finally:
        for name in mine:
            context.node_config.pop(name, None)


def _shown(figures: Figures) -> Mapping[str, str | float]:
    shown: dict[str, str | float] = {
        "device": figures.device, "slowdown": figures.slowdown,
        "bandwidth": figures.bandwidth * figures.slowdown,
    }  # fmt: skip
    return shown | ({"memory": figures.memory} if figures.memory else {})


def _in_host_seconds(content: RecordDict, figures: Figures) -> None:
    """Convert the deadline of fl_elastic's server to seconds of this host."""
    for name, record in list(content.config_records.items()):
        if DEADLINE in record:
            left = float(cast(float, record[DEADLINE])) - figures.downlink_seconds
            host = max(left / figures.slowdown, _LEAST_SECONDS)
            content[name] = ConfigRecord({**record, DEADLINE: host})
