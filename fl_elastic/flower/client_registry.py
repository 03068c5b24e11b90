"""What the server knows about each client: capabilities, coverage, and the model version that it has."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.aggregation.coverage import CoverageLedger, CoverageState
from fl_elastic.errors import UpdateError
from fl_elastic.flower.backoff import Backoff
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client_availability import ClientAvailability
from fl_elastic.flower.fleet_cut import CutState, FleetCut
from fl_elastic.flower.forgetting import TriedRequests, UnlearningRequests
from fl_elastic.flower.group_names import GroupNames
from fl_elastic.flower.round import one_line
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.flower.server_plan import ServerPlanner
from fl_elastic.flower.tasks.describe import Describe
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.training import SelectionState
from fl_elastic.update import Manifest, PartialUpdate

__all__ = ["ClientRegistry"]

_LOG = logging.getLogger("fl_elastic")
_UNKNOWN = "unknown"
_PATIENCE_SECONDS = 120.0
_LONGEST_PAUSE = 64
_MOST_GROUPS = 10_000
_KEEP_IMPORTANCE = 0.7
_Task = TypeVar("_Task", bound=RoundTask)
# Of the clients' learning rates, where they turn out to be too large, and the least.
_SLOWER, _SLOWEST = 0.25, 1 / 64


@dataclass(frozen=True, eq=False)
class FleetState:
    """State of a `ClientRegistry`.

    Parameters
    ----------
    coverage, plan, cut, requests
        States of its ledger, planner, cut and unlearning requests; None for none.
    kept_head, rate, importance
        As it has them.
    """

    coverage: CoverageState | None
    plan: SelectionState | None
    cut: CutState
    requests: TriedRequests
    kept_head: str
    rate: float
    importance: dict[str, float]

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in self.importance.values()):
            raise ValueError("importance is not all numbers from 0")
        if not _SLOWEST <= self.rate <= 1:
            raise ValueError(f"a rate of {self.rate} is none that a server tells its clients")


class ClientRegistry:
    """Keeps one record per client, and says what each is told in a round.

    Parameters
    ----------
    config : RoundConfig
        How the rounds go.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.config = config
        self.cut = FleetCut(config)
        self.capabilities: dict[int, Capabilities] = {}
        # Places of the model that its head reads; empty for the model as clients have it.
        self.read = ""
        # Group of a head that is solved for and not trained.
        self.kept_head = ""
        # Factor of the clients' learning rates.
        self.rate = 1.0
        self.importance: dict[str, float] = {}
        self.availability = ClientAvailability()
        self.groups: GroupNames | None = None
        self._ledger: CoverageLedger | None = None
        self._stored: CoverageState | None = None
        # When a node is asked again what it can do.
        self._silences: dict[int, Backoff] = {}
        self._measuring = False
        self._planner = ServerPlanner() if config.plan == "server" else None
        self.unlearning = UnlearningRequests()
        self._groups = ""

    @property
    def ledger(self) -> CoverageLedger | None:
        """Who trained what; None before the first round."""
        return self._ledger

    def serve(self, manifest: Manifest) -> None:
        """Keep the ledger of this model, as it was stored if it was."""
        if self._ledger is None or self._ledger.manifest.hash != manifest.hash:
            self._ledger = CoverageLedger(manifest)
            if self._stored is not None:
                self._ledger.restore(self._stored)
            self._stored = None
            self.groups = GroupNames(manifest)
            self.importance = _possible(self.importance, self.groups)
            self.capabilities = {
                node: known.bounded(self.groups) for node, known in self.capabilities.items()
            }

    def meet(self, grid: Grid, config: ConfigRecord) -> None:
        """Ask the nodes that have not said what they can do, again and ever more rarely those that do not say.

        Parameters
        ----------
        grid : Grid
            To all connected nodes.
        config : ConfigRecord
            That training messages carry; passed on with the question.
        """
        if not self.config.needs_capabilities:
            return
        asked = [
            node
            for node in grid.get_node_ids()
            if node not in self.capabilities and self.try_to_ask(node)
        ]
        scalars = {key: value for key, value in config.items() if not isinstance(value, list)}
        content = RecordDict(
            {
                "evaluateins.parameters": ArrayRecord(),
                "evaluateins.config": ConfigRecord({**scalars, **self.task(Describe).to_config()}),
            }
        )
        questions = [Message(content, node, "evaluate") for node in asked]
        for reply in grid.send_and_receive(questions, timeout=_PATIENCE_SECONDS) if asked else ():
            self._learn(reply)

    def forget_capabilities(self) -> None:
        """Ask every node again what it can do, as it may do other things now."""
        self.capabilities.clear()
        self._silences.clear()

    def fastest(self, nodes: Iterable[int], count: int) -> set[int]:
        """Return so many of these nodes: those whose rounds take least, by what they said."""

        def seconds(node: int) -> tuple[float, int]:
            known = self.capabilities.get(node)
            return (math.inf if known is None else known.full_round_seconds), node

        return set(sorted(nodes, key=seconds)[:count])

    def slow_down(self) -> None:
        """Tell clients to take a quarter of their learning rates from now on."""
        self.rate = max(_SLOWER * self.rate, _SLOWEST)

    def try_to_ask(self, node: int) -> bool:
        """Count a round of a node that has not said what it can do; return whether it is asked in it."""
        silence = self._silences.setdefault(node, Backoff(_LONGEST_PAUSE, tolerance=1))
        if not silence.is_due:
            silence.passed()
            return False
        silence.failed()
        return True

    def gather(self, nodes: Iterable[int]) -> None:
        """Choose what the clients of this round train, if that is the server's choice."""
        if self._planner is not None:
            cohort = [self.capabilities[node] for node in nodes if node in self.capabilities]
            names = self._planner.choose(cohort, self.importance, self.deadline_seconds())
            self._groups = json.dumps(names) if names else ""

    def closed(self, asked: int, in_time: int) -> None:
        """Note how many of a round's clients answered in time.

        Where a deadline follows from what devices say of themselves, and nobody kept it, the next round goes
        without one: it then follows from what they need.
        """
        by_claims = self.config.deadline is not None and self.config.deadline.seconds is None
        self._measuring = by_claims and asked > 0 and in_time == 0 and not self._measuring

    def _learn(self, reply: Message) -> None:
        node, failure = reply.metadata.src_node_id, ""
        metrics: Mapping[str, Any] = {}
        if reply.has_error():
            failure = reply.error.reason or "no reason given"
        else:
            metrics = reply.content.config_records.get("evaluateres.metrics", ConfigRecord())
        self.learn(node, metrics, failure)

    def learn(self, node: int, metrics: Mapping[str, Any], failure: str = "") -> None:
        """Note what a node says that it can do; log it if it makes no sense, or failed."""
        try:
            if failure:
                raise UpdateError(failure)
            self.capabilities[node] = Capabilities.from_metrics(dict(metrics)).bounded(self.groups)
        except UpdateError as error:
            _LOG.warning("node %s did not say what it can do: %s", node, one_line(str(error)))

    def task(self, kind: type[_Task], **settings: Any) -> _Task:
        """Return a task about the model as the fleet has it now."""
        model: dict[str, Any] = {
            "keep": self.config.sends_changes,
            "read": self.read,
            "cut": self.cut.group,
            "kept_head": self.kept_head,
        }
        return kind(**model | settings)

    def training(self, node: int) -> Train:
        """Return what a node is asked to do in this round."""
        return self.task(
            Train,
            deadline=self.deadline_seconds(),
            groups=self._groups,
            keep_statistics=self.config.keeps_statistics,
            rate=self.rate,
            forgotten=self.unlearning.met_of(node) if self.config.forget else "",
        )

    def deadline_seconds(self) -> float | None:
        """Return how long this round may take; None if it may take as long as it likes."""
        if self.config.deadline is None or self._measuring:
            return None
        times = (
            max(known.full_round_seconds, self.availability.least_seconds(node))
            for node, known in self.capabilities.items()
        )
        return self.config.deadline.among(times)

    def trained(self, node: int, update: PartialUpdate) -> dict[str, float]:
        """Enter what a node trained; return how often it lately trains each tensor."""
        if self._ledger is None:
            return {}
        known = self.capabilities.get(node)
        device = _UNKNOWN if known is None else known.device
        self._ledger.record(str(node), device, update.deltas)
        return self._ledger.probabilities(str(node))

    def weigh(self, reported: Iterable[Mapping[str, float]]) -> None:
        """Take the clients' importance of a round into the fleet's moving average."""
        if self._planner is None:
            return
        distributions = [each for each in reported if each]
        if not distributions:
            return
        names = sorted({name for each in distributions for name in each})
        # Rounded once, whoever answered first.
        mean = {
            name: math.fsum(each.get(name, 0.0) for each in distributions) / len(distributions)
            for name in names
        }
        if self.importance:
            keep = _KEEP_IMPORTANCE
            mean = {
                name: keep * self.importance.get(name, 0.0) + (1 - keep) * mean.get(name, 0.0)
                for name in sorted({*self.importance, *mean})
            }
        self.importance = _possible(mean, self.groups)

    def to_state(self) -> FleetState:
        """Return what must be found again."""
        return FleetState(
            self._stored if self._ledger is None else self._ledger.to_state(),
            None if self._planner is None else self._planner.to_state(),
            self.cut.to_state(), self.unlearning.to_state(), self.kept_head, self.rate, dict(self.importance),
        )  # fmt: skip

    def restore(self, state: FleetState) -> None:
        """Put back what `to_state` gave; the ledger follows when the model is known."""
        self._stored, self._ledger = state.coverage, None
        if self._planner is not None and state.plan is not None:
            self._planner.restore(state.plan)
        self.cut.restore(state.cut)
        self.unlearning.restore(state.requests)
        self.kept_head, self.rate = state.kept_head, state.rate
        self.importance = dict(state.importance)


def _possible(importance: Mapping[str, float], groups: GroupNames | None) -> dict[str, float]:
    """Return the importance of groups that the model can have, and of no more than it can have."""
    most = _MOST_GROUPS if groups is None else groups.most
    known = {name: each for name, each in importance.items() if groups is None or name in groups}
    if len(known) <= most:
        return known
    largest = sorted(known, key=lambda name: (-known[name], name))[:most]
    return {name: known[name] for name in sorted(largest)}
