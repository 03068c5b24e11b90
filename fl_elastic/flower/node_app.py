"""A ClientApp for real devices: it looks after the device by its node's settings, and anybody's client trains."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_elastic.devices.platform import processors
from fl_elastic.devices.power import PowerSupply, power_supply
from fl_elastic.devices.vitals import vitals
from fl_elastic.errors import ElasticError, FleetError
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.records import (
    ERROR,
    as_asked,
    evaluate_reply,
    read_instruction,
    train_reply,
)
from fl_elastic.flower.tasks.task import DEADLINE
from fl_elastic.groups import Batch, LossFn
from fl_elastic.operations import Journal
from fl_elastic.operations.journal import log_to_file, read_journal
from fl_elastic.profiling.execution import (
    Execution,
    load_or_measure_execution,
    measure_execution,
)
from fl_elastic.profiling.profile_key import profile_key
from fl_elastic.training.lean_start import without_compiler

__all__ = ["JOURNAL", "CaredFor", "NodeConfig", "app_of", "node_app", "use_fastest_execution"]


@dataclass(frozen=True)
class NodeConfig:
    """What a node knows about itself: none of it comes from the server.

    Parameters
    ----------
    partition : int
        Which part of the data is its own, where data are split by number.
    state_dir : Path
        What lasts.
    data_root : str, optional
        Where datasets are.
    name : str
        For logs.
    threads : int
        Of torch; 0 for the fastest number by measurement.
    speedup, deadline : float, optional
        Its own budget for a round; with both, the earlier limit holds.
    least_battery : float
        Charge, from 0 to 1, below which it takes no part in a round; 0 for never.
    mains_only : bool
        Whether it takes part only on mains power. Where the platform does not tell, it does.
    stream_dir : Path, optional
        State folder of a learner of a stream on this device, whose samples take the place of other data.
    joining : str
        Registered rule by which the global model is joined with that learner's.
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
            If a setting is missing or not what it should be.
        """
        state, stream = (str(node_config.get(key, "")) for key in ("state-dir", "stream-state-dir"))
        if not state:
            raise FleetError("node config lacks 'state-dir', the folder for what lasts")
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
        """Return why the node takes no part with this power supply; empty if it does.

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


JOURNAL = "metrics.jsonl"
"""In a node's state folder: a line per round that it took part in."""

MakeClient = Callable[[bool], ElasticClient]
"""Returns the client of one message; True asks it to measure again what steps cost."""

_LOG_FILE = "node.log"
_EXECUTION_FILE = "execution.state"
_LEAST_SECONDS = 1e-3
# Measured over predicted step time that is no noise any more, in so many rounds after each other.
_DRIFT, _DRIFT_ROUNDS = 1.5, 3
_LOG = logging.getLogger("fl_elastic")


def node_app(client_fn: Callable[[Context], ElasticClient]) -> ClientApp:
    """Return a ClientApp that looks after the device on which it runs.

    Around what `elastic_client_app` does, each message: keeps a log and, for each round, a line of a journal in the
    node's state folder; takes no part while the battery is too low or the device off its mains; tells temperature,
    throttling and energy; takes what loading took off the deadline; measures the costs again when steps have been
    slower or faster than measured for three rounds; and uses the threads and the memory format that were measured
    to be fastest. An `ElasticError` is told to the server instead of raised. How the node is set up, says its node
    config: see `NodeConfig`.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the `ElasticClient` of this node. One without a ``state_dir`` keeps its state
        in the node's.

    Examples
    --------
    >>> def client_fn(context):
    ...     return ElasticClient(model, train, test, budget=Budget(speedup=2))
    >>> app = node_app(client_fn)
    """

    def cared_for(config: dict[str, Any], context: Context) -> CaredFor:
        node = NodeConfig.of(context.node_config)

        def make(measure_again: bool) -> ElasticClient:
            client = client_fn(context)
            if not client.keeps_state:
                client.keep_state_in(node.state_dir)
            if not client.client_id:
                client.become(str(context.node_config.get("partition-id", context.node_id)))
            use_fastest_execution(node, client.model, client.loss_fn, client.train_loader)
            if measure_again:
                client.forget_profile()
            return client

        return CaredFor(node, config, make)

    return app_of(cared_for)


def app_of(cared_for: Callable[[dict[str, Any], Context], CaredFor]) -> ClientApp:
    """Return a ClientApp that answers each message by what is made for its config and context."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answered("train", message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _answered("evaluate", message, context)

    def _answered(kind: str, message: Message, context: Context) -> Message:
        # A client's process lives for one message: what it does not need is not loaded.
        without_compiler()
        arrays, config = read_instruction(kind, message.content)
        reply: RecordDict
        try:
            node = cared_for(config, context)
            reply = node.train(arrays) if kind == "train" else node.evaluate(arrays)
        except ElasticError as error:
            told = {ERROR: str(error)}
            reply = train_reply([], 0, told) if kind == "train" else evaluate_reply(0.0, 0, told)
        return Message(as_asked(message.content, reply), reply_to=message)

    return app


@dataclass(frozen=True)
class CaredFor:
    """A node in one message: what is done around the training of its client.

    Parameters
    ----------
    node : NodeConfig
        How the node is set up.
    config : dict
        What the server says.
    make_client : callable
        Returns the client; called once.
    case : str
        What the journal's lines are about, where a node may train several things: drift is judged by those of the
        same case.
    """

    node: NodeConfig
    config: dict[str, Any]
    make_client: MakeClient
    case: str = ""

    def train(self, arrays: list[NDArray[Any]]) -> RecordDict:
        """Return the reply to a training message; a line about it goes into the node's journal.

        Raises
        ------
        FleetError
            If the node takes no part now.
        ElasticError
            If it cannot train.
        """
        log_to_file(self.node.state_dir / _LOG_FILE)
        started = time.monotonic()
        refusal = self.node.refusal(power_supply())
        if refusal:
            raise FleetError(f"takes no part in this round: {refusal}")
        again = self._has_drifted()
        if again:
            _LOG.info("steps take another time than was measured: measuring again")
        client = self.make_client(again)
        packed, examples, metrics = client.fit(arrays, self._time_left(started))
        metrics |= vitals(self.node.state_dir)
        metrics["message-seconds"] = time.monotonic() - started
        if client.report is not None:
            metrics["drift"] = client.report.drift
        entry = {
            key.replace("-", "_"): value
            for key, value in metrics.items()
            if isinstance(value, (int, float))
        }
        self._journal.append(
            {
                **entry,
                "method": self.case,
                "measured_again": again,
                "round": int(self.config.get("server-round", 0)),
                "time": time.time(),
            }
        )
        return train_reply(packed, examples, metrics)

    def evaluate(self, arrays: list[NDArray[Any]]) -> RecordDict:
        """Return the reply to an evaluation message, or to the question what the device can do."""
        log_to_file(self.node.state_dir / _LOG_FILE)
        return evaluate_reply(*self.make_client(False).evaluate(arrays, self.config))

    @property
    def _journal(self) -> Journal:
        return Journal(self.node.state_dir / JOURNAL)

    def _time_left(self, started: float) -> dict[str, Any]:
        """Return what the server says, with the time that loading took already out of its deadline."""
        deadline = self.config.get(DEADLINE)
        if deadline is None:
            return self.config
        return self.config | {
            DEADLINE: max(deadline - (time.monotonic() - started), _LEAST_SECONDS)
        }

    def _has_drifted(self) -> bool:
        """Whether all rounds since the last measurement, at least three, ran slower or faster than it says."""
        ratios: list[float] = []
        for entry in reversed(read_journal(self._journal.path)):
            if entry.get("method") != self.case or len(ratios) == _DRIFT_ROUNDS:
                break
            if "drift" in entry:
                ratios.append(_ratio(entry))
            if entry.get("measured_again"):
                break
        if len(ratios) < _DRIFT_ROUNDS:
            return False
        return all(each > _DRIFT for each in ratios) or all(each < 1 / _DRIFT for each in ratios)


def use_fastest_execution(
    node: NodeConfig, model: Any, loss_fn: LossFn, batches: Iterable[Batch]
) -> None:
    """Use the node's threads and memory format: what its config says, or else what was fastest when measured.

    A batch is drawn only where the config does not say; without one, everything stays as it is.
    """
    if node.threads:
        Execution(node.threads).apply(model)
        return
    batch = next(iter(batches), None)
    if batch is None:
        # Whoever trains on these batches says what is wrong.
        return
    most, key = processors().threads, profile_key(model, batch)
    case = f"{key.model} {key.batch_shape} {most} {key.device} {key.torch_version}"
    load_or_measure_execution(
        node.state_dir / _EXECUTION_FILE,
        case,
        lambda: measure_execution(model, loss_fn, batch, most_threads=most),
    ).apply(model)


def _ratio(entry: Mapping[str, Any]) -> float:
    return float(entry.get("drift") or 1.0)
