"""Save a run on disk after every round, and resume it after an interruption.

Flower marks a run as failed when its server process dies and never resumes it, so the strategy keeps its own state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, CheckpointError
from fl_elastic.flower.incremental_grid import incremental
from fl_elastic.flower.records import as_arrays, as_record
from fl_elastic.flower.shown_log import show_log
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.flower.strategy_state import (
    EvaluateFn,
    averaged,
    averaged_in,
    collect,
    names_of,
    own_settings,
    plain_values,
    restore,
    tested,
)
from fl_elastic.flower.wrapped_strategy import check_strategy
from fl_elastic.readout.place import BODY, Reading
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive
from fl_elastic.state.files import remove_leftovers
from fl_elastic.update.manifest import FROZEN_BASE, places_of

_LOG = logging.getLogger("fl_elastic")
_KIND = Kind("fl_elastic.checkpoint", 6)
_MOST_ROUNDS = 999_999
# Two, so that a run survives one damaged file, and can go back by a round if losses jump in the next one.
_KEPT = 2
# Bound on a checkpoint's size: this multiple of the model's bytes, plus bytes for state that grows with the fleet.
_MODELS, _BESIDES = 32, 1 << 30
# Entries of the state that going back by one round restores besides the model.
_UNDONE = re.compile(r"inner\.|(server_optimizer|average)(!|$)")
_NAME = re.compile(r"round-(\d{6})\.state")


@dataclass(frozen=True)
class Checkpoint:
    """A model and the strategies' state after a round; ``strategies`` are the names of their classes.

    ``settings`` holds the settings of the clients' training that rounds have changed: for each name, the value
    given at the start of the run (None if there was none) and the value after the round.
    """

    server_round: int
    arrays: dict[str, NDArray[Any]]
    state: Archive
    strategies: tuple[str, ...]
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def tested(self) -> dict[str, NDArray[Any]]:
        """The model that the run tested after the round and would return as its result.

        It differs from ``arrays``, with which training continues, if the strategy averages models, or if clients
        have trained since the head was last solved for.
        """
        return averaged_in(self.state, self.arrays)


class Checkpointed(Strategy):
    """Writes a checkpoint after every round, and resumes from the newest one when started again.

    The resumed run gives the same model and ledger as an uninterrupted one, bit for bit, if clients answer the same
    in the same order. Clients may repeat the part of a round that was cut off, and learn from it twice.

    Parameters
    ----------
    strategy : Strategy
        Any strategy, usually a `PartialUpdates`. A checkpoint holds the attributes of this strategy and of those
        it wraps, if they are arrays, numbers or text, or lists and dicts of these (momentum, Adam's moments, a
        schedule). It also holds the state of attributes that have ``to_state`` (the coverage ledger, a server
        optimiser) or ``state_dict`` (a privacy accountant, an optimiser of torch), and of random generators. Other
        attributes are not saved.
    directory : path-like
        Folder of the checkpoints; made if missing.
    resume : bool
        Whether `start` resumes from the newest checkpoint; otherwise it starts afresh.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = Checkpointed(FedAdam(), "checkpoints")
    """

    not_inside = "Checkpointed: use Checkpointed(PartialUpdates(...), folder) instead"
    """Error message: inside `PartialUpdates` the methods that write checkpoints would never be called."""

    def __init__(self, strategy: Strategy, directory: str | Path, *, resume: bool = True) -> None:
        show_log()
        check_strategy(strategy)
        if isinstance(strategy, Checkpointed):
            raise CheckpointError("Checkpointed is put around another Checkpointed: one is enough")
        self.strategy = strategy
        self.directory = Path(directory)
        self.resume = resume
        self._first_round = 0
        self._begun = plain_values(strategy)
        # The round, the model and the values of the checkpoint that was written last.
        self._newest: tuple[int, ArrayRecord, dict[str, str]] | None = None
        # The settings of the clients' training as they were given, and as they are now.
        self._given, self._settings = ConfigRecord(), ConfigRecord()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the remaining rounds; rounds are counted from the start of the whole run."""
        remove_leftovers(self.directory)
        self._given, self._settings = own_settings(train_config), own_settings(train_config)
        if isinstance(self.strategy, PartialUpdates):
            self.strategy.begin_with(initial_arrays)
            self.strategy.runs_until(num_rounds)
        found = load_checkpoint(self.directory, initial_arrays) if self.resume else None
        if found is not None:
            # Warn: a user who wants a new run would take these weights for fresh ones.
            _LOG.warning(
                "resuming after round %s from %s: these weights are an earlier run's. Use another directory, or "
                "resume=False, to start afresh",
                found.server_round, self.directory,
            )  # fmt: skip
            if found.strategies != (mine := names_of(self.strategy)):
                raise CheckpointError(
                    f"checkpoints in {self.directory} are of another strategy, "
                    f"{' around '.join(found.strategies)}, this one is {' around '.join(mine)}; "
                    "use another directory or delete them"
                )
            self._warn_of_fixed_places(found, initial_arrays)
            self._restore_previous_model(found, initial_arrays)
            initial_arrays = as_record(found.arrays)
            restore(self.strategy, found.state, self._begun)
            self._restore_settings(found.settings)
            if found.server_round >= num_rounds:
                _LOG.warning(
                    "nothing is left to do: the newest checkpoint in %s is of round %s, and %s rounds were asked "
                    "for. Its model is the result; ask for more rounds, or use another directory (or resume=False) "
                    "to start afresh",
                    self.directory, found.server_round, num_rounds,
                )  # fmt: skip
        elif isinstance(self.strategy, PartialUpdates):
            begun = initial_arrays
            initial_arrays = self.strategy.round_zero(grid, begun, timeout, train_config)
            if initial_arrays is not begun:
                self._save(0, initial_arrays)
        evaluate_fn = tested(self.strategy, evaluate_fn)
        first = self._first_round = 0 if found is None else found.server_round
        with incremental(grid, self.strategy) as replies_one_by_one:
            result = super().start(
                grid=replies_one_by_one,
                initial_arrays=initial_arrays,
                num_rounds=max(num_rounds - first, 0),
                timeout=timeout,
                train_config=self._settings,
                evaluate_config=own_settings(evaluate_config),
                evaluate_fn=None if evaluate_fn is None else lambda r, a: evaluate_fn(r + first, a),
            )
        result.arrays = averaged(self.strategy, result.arrays or initial_arrays)
        return _renumbered(result, first)

    def _warn_of_fixed_places(self, found: Checkpoint, begun: ArrayRecord) -> None:
        """Warn if the head reads elsewhere than the config says, because only round zero chooses its places."""
        read = self.strategy.config.read if isinstance(self.strategy, PartialUpdates) else "none"
        reads = places_of(found.arrays) or "last"
        chosen = read in ("none", reads) or (read != "last" and not Reading.parse(read).places)
        if not chosen and not places_of(as_arrays(begun)):
            _LOG.warning(
                "the head of this checkpoint reads %s and goes on doing so: read=%r has no effect now. "
                "Use another directory, or resume=False, to start afresh",
                reads, read,
            )  # fmt: skip

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, counting rounds from the start of the whole run."""
        return self.strategy.configure_train(server_round + self._first_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Delegate, then write the checkpoint of the round."""
        overall = server_round + self._first_round
        arrays, metrics = self.strategy.aggregate_train(overall, replies)
        if arrays is not None:
            self._save(overall, arrays)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, counting rounds from the start of the whole run."""
        return self.strategy.configure_evaluate(
            server_round + self._first_round, arrays, config, grid
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate; write the checkpoint again if a strategy stored a result of the test, such as the best loss."""
        overall = server_round + self._first_round
        found = self.strategy.aggregate_evaluate(overall, replies)
        if self._newest is not None and self._newest[0] == overall:
            _, arrays, values = self._newest
            if plain_values(self.strategy) != values:
                self._save(overall, arrays)
        return found

    def summary(self) -> None:
        """Log where checkpoints go, and the strategy's summary."""
        _LOG.info("checkpoints in %s", self.directory)
        self.strategy.summary()

    def _restore_settings(self, settings: Mapping[str, tuple[Any, Any]]) -> None:
        """Restore the settings that rounds have changed, except those that the user gives another value now."""
        for name, (given, reached) in settings.items():
            if self._settings.get(name) == given:
                self._settings[name] = reached
            else:
                _LOG.warning(
                    "setting %r is %s, but was %s when the run of the checkpoint began: it keeps its new value and "
                    "is not set to %s, the value after the last round",
                    name, self._settings.get(name), given, reached,
                )  # fmt: skip

    def _restore_previous_model(self, found: Checkpoint, begun: ArrayRecord) -> None:
        """Load the model before the newest one, if it is on disk: the run goes back to it if losses jump."""
        strategy = self.strategy
        guard = found.state.facts.get("guard")
        had_model = isinstance(guard, dict) and guard.get("had_model") is True
        if not isinstance(strategy, PartialUpdates) or not had_model:
            return
        before = Checkpoint(0, as_arrays(begun), Archive({}, {}), ())
        path = _path(self.directory, found.server_round - 1)
        try:
            if path.exists():
                before = _read(path, _most_bytes(begun))
            elif found.server_round > 1 or strategy.config.solves_head:
                return
            if _kinds(before.arrays) == _kinds(found.arrays):
                facts, arrays = (
                    {name: array for name, array in some.items() if _UNDONE.match(name)}
                    for some in (before.state.facts, before.state.arrays)
                )
                restore(strategy, Archive(facts, arrays), self._begun)
                strategy.keep_before(before.arrays)
        except (OSError, ValueError, CheckpointError) as error:
            _LOG.warning("the run cannot go back by a round: %s: %s", path, error)

    def _save(self, server_round: int, arrays: ArrayRecord) -> None:
        entries = {f"array/{name}": array.numpy() for name, array in arrays.items()}
        state = collect(self.strategy, self._begun)
        self._newest = server_round, arrays, plain_values(self.strategy)
        entries |= {f"state/{name}": value for name, value in state.arrays.items()}
        about = {
            "round": server_round,
            "names": list(arrays),
            "strategies": names_of(self.strategy),
            "objects": state.facts,
            "settings": _changed(self._given, self._settings),
        }
        path = _path(self.directory, server_round)
        try:
            write_archive(path, _KIND, about, entries)
            # Files of later rounds are left from an earlier run, which must not be resumed.
            later = [old for old in _files(self.directory) if old.name > path.name]
            earlier = [old for old in _files(self.directory) if old.name <= path.name]
            for old in [*later, *earlier[_KEPT:]]:
                old.unlink(missing_ok=True)
        except (OSError, ArchiveError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"cannot write checkpoint {path}: {why}") from None


def load_checkpoint(directory: str | Path, expected: ArrayRecord) -> Checkpoint | None:
    """Return the newest readable checkpoint, or None if there is none.

    Raises
    ------
    CheckpointError
        If the checkpoint holds another model than ``expected``, or none of the files can be read.
    """
    damaged, model = [], as_arrays(expected)
    for path in _files(Path(directory)):
        try:
            found = _read(path, _most_bytes(expected))
        except (OSError, ValueError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if not _is_of(found.arrays, model):
            raise CheckpointError(
                f"checkpoint {path} holds another model; use another directory or delete it"
            )
        if _base(found.arrays) != _base(model):
            raise CheckpointError(
                f"checkpoint {path} is of a model with another frozen base: load the pretrained weights that the "
                "run began with, use another directory or delete it"
            )
        return found
    if damaged:
        raise CheckpointError(f"no checkpoint in {directory} can be read: {'; '.join(damaged)}")
    return None


def _path(directory: Path, server_round: int) -> Path:
    return directory / f"round-{server_round:06d}.state"


def _files(directory: Path) -> list[Path]:
    """Return checkpoint files, newest first."""
    found = [path for path in directory.glob("round-*.state") if _NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def _read(path: Path, most: int) -> Checkpoint:
    """Read a checkpoint; raise OSError or ValueError if the file holds anything else."""
    found = read_archive(path, _KIND, most=most)
    try:
        return _checkpoint(found)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a checkpoint ({type(error).__name__} {error})") from None


def _checkpoint(found: Archive) -> Checkpoint:
    about = found.facts
    server_round = about["round"]
    if type(server_round) is not int or not 0 <= server_round <= _MOST_ROUNDS:
        raise ValueError(f"round {str(server_round)[:40]!r}, expected a number from 0")
    return Checkpoint(
        server_round=server_round,
        arrays={str(name): found.arrays[f"array/{name}"] for name in about["names"]},
        state=Archive(dict(about["objects"]), found.under("state/")),
        strategies=tuple(str(name) for name in about["strategies"]),
        settings={str(n): _pair(each) for n, each in dict(about["settings"]).items()},
    )


def _changed(given: ConfigRecord, settings: ConfigRecord) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those given, with both values; bytes cannot be stored."""
    return {
        name: (given.get(name), value)
        for name, value in settings.items()
        if value != given.get(name) and not _is_bytes(value) and not _is_bytes(given.get(name))
    }


def _is_bytes(value: object) -> bool:
    return any(isinstance(each, bytes) for each in (value if isinstance(value, list) else [value]))


def _pair(values: Any) -> tuple[Any, Any]:
    given, reached = values
    # ConfigRecord raises an error for a value that no setting can have.
    ConfigRecord({"x": reached})
    return given, reached


def _most_bytes(expected: ArrayRecord) -> int:
    """Return the largest plausible size in bytes of a checkpoint: moments, means, and the ledger of clients."""
    return _MODELS * sum(array.numpy().nbytes for array in expected.values()) + _BESIDES


def _kinds(arrays: dict[str, NDArray[Any]]) -> dict[str, tuple[tuple[int, ...], bool]]:
    # Flower's own strategies turn float32 into float64, and average the integers of a norm's counter too.
    return {
        name: (tuple(array.shape), array.dtype.kind in "biuf") for name, array in arrays.items()
    }


def _is_of(found: dict[str, NDArray[Any]], model: dict[str, NDArray[Any]]) -> bool:
    """Return whether a checkpoint is of this model, or of the part of it that ends where a head reads."""
    if places_of(found) == places_of(model):
        return _kinds(found) == _kinds(model)
    if places_of(model):
        return False
    body = f"{BODY}."
    own = {name.removeprefix(body): each for name, each in found.items() if name.startswith(body)}
    expected = _kinds(model)
    return all(expected.get(name) == kind for name, kind in _kinds(own).items())


def _base(arrays: dict[str, NDArray[Any]]) -> bytes:
    return arrays[FROZEN_BASE].tobytes() if FROZEN_BASE in arrays else b""


def _renumbered(result: Result, first: int) -> Result:
    if first:
        for field in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
            metrics = getattr(result, field)
            setattr(result, field, {number + first: record for number, record in metrics.items()})
        central = result.evaluate_metrics_serverapp
        result.evaluate_metrics_serverapp = {r + first: record for r, record in central.items()}
    return result
