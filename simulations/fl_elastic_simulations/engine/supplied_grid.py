"""A grid that sends each simulated client its costs and files with a message, and gets the files back."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.incremental_grid import GridWrapper
from fl_elastic.flower.tasks.task import config_key
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.store import KIND
from fl_elastic.readout.place import Reading
from fl_elastic.state.archive import archive_bytes, archive_of
from fl_elastic.state.codec import from_archive, to_archive

_COSTS = "fl_elastic_simulations.costs"
"""Record of cost profiles, by the places that the model's head reads."""
_FILES = "fl_elastic_simulations.files"
_MACHINE, _NAME = "fl_elastic_simulations.machine", "name"
_READ, _PLACES = config_key("read"), config_key("places")
# Flower's code for an error outside of an app.
_HOST_FAILED = 0


def on_a_cluster() -> bool:
    """Return whether clients run on the Ray cluster of ``RAY_ADDRESS``, whose machines share no folder."""
    return bool(os.environ.get("RAY_ADDRESS"))


class SuppliedGrid(GridWrapper):
    """Wraps a grid; adds to each message the client's costs, and on a cluster the files of its state.

    So no client measures costs itself, or depends on the machine that it runs on.

    Parameters
    ----------
    grid : Grid
        The wrapped grid.
    costs : callable
        ``costs(read)`` returns the cost profile of the model that ends at these places.
    folder : Path, optional
        Folder of the files of all clients between messages, under the names that the clients gave them. Without it,
        clients keep their files themselves.
    ------
    ScenarioError
        If a machine is lost while a client trains on it.
    """

    streams = True

    def __init__(
        self, grid: Grid, costs: Callable[[str], CostProfile], folder: Path | None = None
    ) -> None:
        super().__init__(grid)
        self._costs, self._folder = costs, folder
        self._records: dict[frozenset[str], ConfigRecord] = {}
        self._names: dict[int, list[str]] = {}
        self._machines: Counter[str] = Counter()

    @property
    def machines(self) -> dict[str, int]:
        """Number of training messages that each machine of a cluster handled."""
        return dict(sorted(self._machines.items()))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send the messages; yield the replies as the grid does."""
        sent = [self._supplied(message) for message in messages]
        return map(self._taken, self.inner.send_and_receive(sent, timeout=timeout))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages; return their ids."""
        return self.inner.push_messages([self._supplied(message) for message in messages])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies."""
        return [self._taken(reply) for reply in self.inner.pull_messages(message_ids)]

    def _supplied(self, message: Message) -> Message:
        """Add the records to a copy of a message's content, which other messages may share."""
        content = RecordDict(dict(message.content))
        content[_COSTS] = self._record_of(_places(content))
        if self._folder is not None:
            names = self._names.get(message.metadata.dst_node_id, [])
            content[_FILES] = _record(self._folder, names)
        message.content = content
        return message

    def _record_of(self, places: frozenset[str]) -> ConfigRecord:
        """Return the costs of models that read at these places; messages share the record."""
        if places not in self._records:
            found = {read: to_archive(self._costs(read)) for read in sorted(places)}
            self._records[places] = ConfigRecord(
                {read: archive_bytes(KIND, each) for read, each in found.items()}
            )
        return self._records[places]

    def _taken(self, reply: Message) -> Message:
        """Store the files that came with a reply; return the reply without them."""
        if reply.has_error():
            if reply.error.code == _HOST_FAILED:
                # Ray's message has many lines.
                why = str(reply.error.reason).partition("\n")[0]
                raise ScenarioError(
                    f"a machine was lost on which a client was training, for no fault of its device's: {why}; run "
                    "again with --resume on machines that stay"
                )
            return reply
        record = reply.content.pop(_FILES, None)
        machine = reply.content.pop(_MACHINE, None)
        if self._folder is not None and isinstance(record, ConfigRecord):
            self._names[reply.metadata.src_node_id] = list(record)
            _write(self._folder, record)
        if isinstance(machine, ConfigRecord):
            self._machines[str(machine[_NAME])] += 1
        return reply


def costs_in(content: RecordDict) -> dict[str, CostProfile]:
    """Return the costs that came with a message, by the places that the model reads."""
    record = content[_COSTS]
    return {read: _profile(cast(bytes, data)) for read, data in record.items()}


@lru_cache(maxsize=8)
def _profile(data: bytes) -> CostProfile:
    return from_archive(CostProfile, archive_of(data, KIND))


@contextmanager
def with_files(content: RecordDict) -> Iterator[Path | None]:
    """Yield a folder with the files that came with a message; None if clients keep their files themselves."""
    record = content.get(_FILES)
    if not isinstance(record, ConfigRecord):
        yield None
        return
    with TemporaryDirectory(prefix="fl-elastic-") as name:
        folder = Path(name)
        _write(folder, record)
        yield folder


def files_in(folder: Path) -> RecordDict:
    """Return the records to add to a reply: the files of a folder, and the name of this machine."""
    names = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = _record(folder, [str(path.relative_to(folder)) for path in names])
    return RecordDict({_FILES: files, _MACHINE: ConfigRecord({_NAME: platform.node()})})


def _record(folder: Path, names: Iterable[str]) -> ConfigRecord:
    return ConfigRecord({name: (folder / name).read_bytes() for name in names})


def _write(folder: Path, record: ConfigRecord) -> None:
    for name, data in record.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cast(bytes, data))


def _places(content: RecordDict) -> frozenset[str]:
    """Return the readings whose costs a message needs: that of the whole model, and those that it names."""
    configs = content.config_records.values()
    named = {str(config.get(key, "")) for config in configs for key in (_READ, _PLACES)}
    return frozenset({"", *(name for name in named if name and Reading.parse(name).places)})
