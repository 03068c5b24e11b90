"""The server's side of a real fleet: rounds, checkpoints, a journal, and a summary at the end."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from fl_elastic.aggregation.coverage import CoverageLedger
from fl_elastic.errors import DatasetError, FleetError
from fl_elastic.flower.checkpoint import Checkpointed
from fl_elastic.flower.records import as_arrays, as_record
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.losses import classification_loss
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import log_to_file
from fl_elastic.state.files import OWNER_ONLY, write_atomically
from fl_elastic.training import evaluate
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.manifest import places_of
from fl_elastic_simulations.engine.method_model import method_model
from fl_elastic_simulations.engine.methods import method_strategy
from fl_elastic_simulations.engine.summary import final_accuracy
from fl_elastic_simulations.engine.workload import scenario_model, test_batches
from fl_elastic_simulations.fleet.fleet_method import fleet_method
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection

JOURNAL = "rounds.jsonl"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
SCENARIO = "scenario.json"
_LOG_FILE = "server.log"
_TOTALS = ("uplink_bytes", "downlink_bytes", "accepted", "rejected")
_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True)
class FleetRun:
    """One method of a scenario on a real fleet.

    Parameters
    ----------
    scenario : Scenario
        The scenario; its fleet determines the number of nodes, not their speed.
    method : MethodSection
        The method.
    seed : int
        Seed of initial weights, split and batches.
    results : Path
        Folder of journal, checkpoints and summary.
    data_root : str, optional
        Folder of datasets for the server's test of the model.
    resume : bool
        Whether to resume from the newest checkpoint in ``results``.
    round_timeout : float
        Seconds after which a round continues without the nodes that have not answered.
    node_timeout : float
        Seconds to wait at the start for as many nodes as the scenario has clients; then the present ones begin.
    """

    scenario: Scenario
    method: MethodSection
    seed: int
    results: Path
    data_root: str | None = None
    resume: bool = False
    round_timeout: float = 3600.0
    node_timeout: float = 120.0

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> FleetRun:
        """Read Flower's run config.

        Raises
        ------
        ScenarioError
            If the scenario or the method is invalid.
        FleetError
            If the folder of results is not absolute.
        """
        scenario = Scenario.from_json(str(run_config.get("scenario", "")))
        method = fleet_method(scenario, str(run_config.get("method", "")))
        results = Path(str(run_config.get("results", "")))
        if not results.is_absolute():
            raise FleetError(f"run config results = {str(results)!r} is not an absolute folder")
        return cls(
            scenario=scenario,
            method=method,
            seed=int(run_config.get("seed", 0)),
            results=results,
            data_root=str(run_config.get("data-root", "")) or None,
            resume=bool(run_config.get("resume", False)),
            round_timeout=_seconds(run_config, "round-timeout", 3600.0),
            node_timeout=_seconds(run_config, "node-timeout", 120.0),
        )

    def run(self, grid: Grid) -> dict[str, Any]:
        """Run the remaining rounds; return the summary, which is also written to a file."""
        log_to_file(self.results / _LOG_FILE)
        write_atomically(self.results / SCENARIO, self.scenario.to_json().encode(), OWNER_ONLY)
        model = scenario_model(self.scenario, self.data_root, self.seed)
        manifest = Manifest.of(model)
        if not self.resume:
            _put_away(self.results / CHECKPOINTS)
        rounds_journal = _RoundJournal(Journal(self.results / JOURNAL), self.resume, grid)
        strategy = method_strategy(self.scenario, self.method, self.seed, rounds_journal.trained)
        _wait_for_nodes(grid, len(self.scenario.clients), self.node_timeout)
        # From here on, rounds run with whatever nodes are there.
        strategy.inner.min_available_nodes = 1  # type: ignore[attr-defined]
        first = weights_of(model, manifest)

        def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            weights = as_arrays(arrays)
            try:
                found = evaluate(
                    self._model(weights),
                    classification_loss,
                    test_batches(self.scenario, self.data_root),
                )
            except DatasetError as error:
                # A server without data can still merge.
                _LOG.warning("the model is not tested: %s", error)
                rounds_journal.close(server_round, {}, strategy.fleet.ledger)
                return None
            quality: dict[str, Any] = {"loss": found.loss}
            if found.accuracy is not None:
                quality["accuracy"] = found.accuracy
            rounds_journal.close(server_round, quality, strategy.fleet.ledger)
            return MetricRecord(quality)

        Checkpointed(strategy, self.results / CHECKPOINTS, resume=self.resume).start(
            grid=grid,
            initial_arrays=as_record(first),
            num_rounds=self.scenario.training.rounds,
            timeout=self.round_timeout,
            train_config=ConfigRecord(
                {
                    "scenario": self.scenario.to_json(),
                    "method": self.method.name,
                    "seed": self.seed,
                }
            ),
            evaluate_fn=tested,
        )
        summary = self._summary(Journal(self.results / JOURNAL).entries())
        write_atomically(
            self.results / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode(), OWNER_ONLY
        )
        return summary

    def _model(self, weights: Mapping[str, NDArray[Any]]) -> nn.Module:
        """Return the model for these weights, which may end where a head reads."""
        model = method_model(
            self.scenario, self.method, self.data_root, self.seed, places_of(weights)
        )
        load_weights(model, Manifest.of(model), weights)
        return model

    def _summary(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        rounds = [entry for entry in entries if entry.get("round", 0) > 0]
        last = rounds[-1] if rounds else {}
        tested = [entry["accuracy"] for entry in rounds if entry.get("accuracy") is not None]
        return {
            "title": self.scenario.title,
            "method": self.method.name,
            "seed": self.seed,
            "rounds": last.get("round", 0),
            "final_accuracy": final_accuracy(tested) if tested else None,
            # Every entry has the totals, since the first entries of a long run are not kept.
            "seconds": float(last.get("seconds_total", 0.0)),
            **{f"{name}_total": last.get(f"{name}_total", 0) for name in _TOTALS},
        }


def _put_away(checkpoints: Path) -> None:
    """Rename checkpoints of an earlier run, so that `resume` cannot find them if this run ends before a round."""
    before = checkpoints.with_name(f"{checkpoints.name}.before")
    try:
        if checkpoints.is_dir() and any(checkpoints.iterdir()):
            shutil.rmtree(before, ignore_errors=True)
            checkpoints.rename(before)
    except OSError as error:
        raise FleetError(f"cannot rename {checkpoints}: {error.strerror or error}") from None


def _seconds(run_config: Mapping[str, Any], key: str, default: float) -> float:
    value = run_config.get(key, default)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise FleetError(f"run config {key} = {value!r} is not a positive number of seconds")
    return float(value)


def _wait_for_nodes(grid: Grid, wanted: int, seconds: float) -> None:
    """Wait for all nodes until the time limit, then for at least one node without limit."""
    until = time.monotonic() + seconds
    while (found := len(list(grid.get_node_ids()))) < wanted:
        if found and time.monotonic() > until:
            _LOG.warning("%s of %s nodes are there; they begin", found, wanted)
            return
        time.sleep(0.5)


def _coverage(ledger: CoverageLedger | None, node: int) -> float | None:
    """Return a node's coverage: over its rounds and all tensors, the mean share that it trained."""
    entry = None if ledger is None else ledger.clients.get(str(node))
    if entry is None or not entry.rounds:
        return None
    return float(entry.trained.mean() / entry.rounds)


@dataclass
class _RoundJournal:
    """Writes the journal entry of each round once its model is tested."""

    journal: Journal
    resume: bool
    grid: Grid
    _records: list[RoundRecord] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _totals: dict[str, int] = field(default_factory=dict)
    _seconds: float = 0.0
    _last_round: int = -1

    def __post_init__(self) -> None:
        before = (self.journal.last() or {}) if self.resume else {}
        self._totals = {name: int(before.get(f"{name}_total", 0)) for name in _TOTALS}
        self._seconds = float(before.get("seconds_total", 0.0))
        self._last_round = int(before.get("round", -1))
        if not self.resume:
            self.journal.remove()

    def trained(self, record: RoundRecord) -> None:
        """Keep the record of a round, or of an auxiliary task, until the model is tested."""
        self._records.append(record)

    def close(
        self, server_round: int, quality: dict[str, Any], ledger: CoverageLedger | None
    ) -> None:
        """Write the entry of a round; that of round 0, the initial weights, only holds their quality."""
        records, self._records = self._records, []
        if not records:
            # A resumed run tests its model again, whose entry may exist already.
            if server_round > self._last_round:
                self.journal.append(
                    {"round": server_round, "time": time.time(), **quality, **self._so_far()}
                )
            self._since = time.monotonic()
            return
        now = time.monotonic()
        names = {node.node_id: node.name or str(node.node_id) for node in self.grid.get_nodes()}
        # Round zero does not train.
        record = next((each for each in records if each.trains), records[-1])
        replies = [reply for each in records for reply in each.accepted]
        counts = {
            "uplink_bytes": sum(reply.uplink_bytes for reply in replies),
            "downlink_bytes": sum(each.downlink_total_bytes for each in records),
            "accepted": len(record.accepted),
            "rejected": len(record.rejected),
        }
        for name, count in counts.items():
            self._totals[name] += count
        self._seconds += now - self._since
        self.journal.append(
            {
                "round": server_round,
                "time": time.time(),
                "round_seconds": now - self._since,
                "deadline_seconds": record.deadline,
                **quality,
                **counts,
                **self._so_far(),
                "stayed": record.stayed,
                "shortened": len(record.shortened),
                "stepped_back": record.stepped_back,
                "cut": record.cut,
                "nodes": {
                    names.get(reply.node_id, str(reply.node_id)): {
                        **_about(reply),
                        "coverage": _coverage(ledger, reply.node_id),
                    }
                    for reply in record.accepted
                },
                "rejections": [
                    {"node": names.get(each.node_id, str(each.node_id)), "reason": each.reason}
                    for each in record.rejected
                ],
            }
        )
        self._since = now

    def _so_far(self) -> dict[str, float]:
        """Return the totals of the run so far."""
        totals = {f"{name}_total": total for name, total in self._totals.items()}
        return {**totals, "seconds_total": self._seconds}


def _about(reply: AcceptedReply) -> dict[str, Any]:
    """Return the numbers of a reply."""
    numbers = {
        key.replace("-", "_"): value
        for key, value in reply.metrics.items()
        if isinstance(value, (int, float))
    }
    return {
        **numbers, "uplink_bytes": reply.uplink_bytes, "num_examples": reply.num_examples,
    }  # fmt: skip
