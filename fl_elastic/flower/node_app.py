"""A ClientApp for real devices, which trains any `ElasticClient`.

Besides training, the app refuses rounds while the battery is low (`NodeConfig.refusal`), sends the device's vitals,
keeps a journal, and measures costs again when the device has become faster or slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_elastic.devices.platform import processors
from fl_elastic.devices.power import power_supply
from fl_elastic.devices.vitals import vitals
from fl_elastic.errors import ElasticError, FleetError
from fl_elastic.flower.app import answering_app
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.flower.records import (
    ERROR,
    evaluate_reply,
    train_reply,
)
from fl_elastic.flower.tasks.task import DEADLINE
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import counted
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import log_to_file, read_journal
from fl_elastic.profiling.execution import (
    Execution,
    load_or_measure_execution,
    measure_execution,
)
from fl_elastic.profiling.profile import profile_key

JOURNAL = "metrics.jsonl"
"""File in a node's state folder with one line per round that the node took part in."""
MakeClient = Callable[[bool], ElasticClient]
"""Returns the client for one message; the argument True asks it to measure the costs of steps again."""
_LOG_FILE = "node.log"
_EXECUTION_FILE = "execution.state"
_LEAST_SECONDS = 1e-3
# Ratio of measured to predicted step time that is not noise if it holds in this many consecutive rounds.
_DRIFT, _DRIFT_ROUNDS = 1.5, 3
_LOG = logging.getLogger("fl_elastic")


def node_app(client_fn: Callable[[Context], ElasticClient]) -> ClientApp:
    """Return a ClientApp that looks after the device on which it runs.

    Around the work of `elastic_client_app`, it does the following for each message:

    - keeps a log and, for each round, a line of a journal in the node's state folder;
    - refuses to train while the battery is too low, or while a device that needs mains power has none;
    - reports temperature, throttling and energy;
    - subtracts the time of loading from the deadline;
    - determines the costs again after three rounds whose steps were all slower, or all faster, than predicted;
    - uses the threads and the memory format that were measured to be fastest.

    An `ElasticError` is sent to the server instead of being raised. `NodeConfig` describes the node's settings.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the `ElasticClient` of this node. A client without a ``state_dir`` uses the
        node's.

    Examples
    --------
    >>> def client_fn(context):
    ...     return ElasticClient(model, train, test, budget=Budget(speedup=2))
    >>> app = node_app(client_fn)
    """

    def message_of(config: dict[str, Any], context: Context) -> NodeMessage:
        node = NodeConfig.of(context.node_config)

        def make(measure_again: bool) -> ElasticClient:
            client = client_fn(context)
            client.run_on(context, node.state_dir)
            use_fastest_execution(node, client.model, client.loss_fn, client.train_loader)
            if measure_again:
                client.forget_profile()
            return client

        return NodeMessage(node, config, make)

    return app_of(message_of)


def app_of(message_of: Callable[[dict[str, Any], Context], NodeMessage]) -> ClientApp:
    """Return a ClientApp that answers each message through the `NodeMessage` of its config and context."""

    def answer(
        kind: str, arrays: list[NDArray[Any]], config: dict[str, Any], context: Context
    ) -> RecordDict:
        try:
            node = message_of(config, context)
            return node.train(arrays) if kind == "train" else node.evaluate(arrays)
        except ElasticError as error:
            failed = {ERROR: str(error)}
            return train_reply([], 0, failed) if kind == "train" else evaluate_reply(0.0, 0, failed)

    return answering_app(answer)


@dataclass(frozen=True)
class NodeMessage:
    """Answers one message on a node: runs the client, and does the node's own work around it, such as the journal.

    Parameters
    ----------
    node : NodeConfig
        The node's settings.
    config : dict
        Config of the server's message.
    make_client : callable
        Returns the client; called once.
    case : str
        Label of this training in the journal, if a node may train several methods: drift is judged by the lines
        with the same label.
    """

    node: NodeConfig
    config: dict[str, Any]
    make_client: MakeClient
    case: str = ""

    def train(self, arrays: list[NDArray[Any]]) -> RecordDict:
        """Return the reply to a training message; add a line about it to the node's journal.

        Raises
        ------
        FleetError
            If the node refuses to train now.
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
            _LOG.info("steps are slower or faster than predicted: measuring their costs again")
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
        """Return the reply to an evaluation message, or to a request for the device's capabilities."""
        log_to_file(self.node.state_dir / _LOG_FILE)
        return evaluate_reply(*self.make_client(False).evaluate(arrays, self.config))

    @property
    def _journal(self) -> Journal:
        return Journal(self.node.state_dir / JOURNAL)

    def _time_left(self, started: float) -> dict[str, Any]:
        """Return the server's config, with the time already spent on loading subtracted from the deadline."""
        deadline = self.config.get(DEADLINE)
        if deadline is None:
            return self.config
        return self.config | {
            DEADLINE: max(deadline - (time.monotonic() - started), _LEAST_SECONDS)
        }

    def _has_drifted(self) -> bool:
        """Return whether the last three rounds since the last measurement all deviate in one direction."""
        ratios: list[float] = []
        for entry in reversed(read_journal(self._journal.path)):
            if entry.get("method") != self.case or len(ratios) == _DRIFT_ROUNDS:
                break
            if "drift" in entry:
                ratios.append(float(entry["drift"] or 1.0))
            if entry.get("measured_again"):
                break
        if len(ratios) < _DRIFT_ROUNDS:
            return False
        return all(ratio > _DRIFT for ratio in ratios) or all(
            ratio < 1 / _DRIFT for ratio in ratios
        )


def use_fastest_execution(
    node: NodeConfig, model: Any, loss_fn: LossFn, batches: Iterable[Batch]
) -> None:
    """Use the number of threads in the node's config, or else the threads and memory format measured to be fastest.

    A batch is read only for the measurement; if there is no batch, nothing changes.
    """
    if node.threads:
        Execution(node.threads).apply(model)
        return
    batch = next((batch for batch, _ in counted(batches)), None)
    if batch is None:
        # Training on these batches will report the error.
        return
    most, key = processors().threads, profile_key(model, batch)
    case = f"{key.model} {key.batch_shape} {most} {key.device} {key.torch_version}"
    load_or_measure_execution(
        node.state_dir / _EXECUTION_FILE,
        case,
        lambda: measure_execution(model, loss_fn, batch, most_threads=most),
    ).apply(model)
