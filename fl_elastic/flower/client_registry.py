"""What the server knows about each client: capabilities, coverage, and the model version that it holds."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.aggregation.coverage import CoverageLedger, CoverageState
from fl_elastic.errors import UpdateError
from fl_elastic.flower.capabilities import Capabilities, GroupNames
from fl_elastic.flower.client_availability import Backoff, ClientAvailability
from fl_elastic.flower.fleet_cut import FleetCut
from fl_elastic.flower.forgetting import ForgetRequests, TriedRequests
from fl_elastic.flower.round import one_line
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.flower.server_plan import ServerPlanner
from fl_elastic.flower.tasks.describe import Describe
from fl_elastic.flower.tasks.task import EPOCHS, RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.training import SelectionState
from fl_elastic.update import Manifest, PartialUpdate

_LOG = logging.getLogger("fl_elastic")
_UNKNOWN = "unknown"
# Timeout in seconds for answers about capabilities.
_PATIENCE_SECONDS = 120.0
# Longest pause, in rounds, between two requests for the capabilities of a node that does not report them.
_LONGEST_PAUSE = 64
# Most groups whose importance is kept while the model's groups are not known.
_MOST_GROUPS = 10_000
# Weight of the old value in the moving average of the fleet's importance.
_KEEP_IMPORTANCE = 0.7
_Task = TypeVar("_Task", bound=RoundTask)
# Factor by which learning rates shrink when they turn out to be too large, and the smallest total factor.
_SLOWER, _SLOWEST = 0.25, 1 / 64


@dataclass(frozen=True, eq=False)
class FleetState:
    """State of a `ClientRegistry`.

    Parameters
    ----------
    coverage, plan, cut, requests
        States of its ledger, planner, cut and requests to forget; None if it has none.
    kept_head, rate, importance
        Attributes of the registry.
    """

    coverage: CoverageState | None
    plan: SelectionState | None
    cut: str
    requests: TriedRequests
    kept_head: str
    rate: float
    importance: dict[str, float]

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in self.importance.values()):
            raise ValueError("importance has scores that are negative or not finite")
        if not _SLOWEST <= self.rate <= 1:
            raise ValueError(f"learning-rate factor {self.rate} is not from {_SLOWEST} to 1")


class ClientRegistry:
    """Keeps what the server knows of each client, and makes each client's task for a round.

    Parameters
    ----------
    config : RoundConfig
        Settings of the rounds.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.config = config
        self.cut = FleetCut(config)
        self.capabilities: dict[int, Capabilities] = {}
        # Places of the model that the head reads; empty for the clients' own model.
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
        # By node: when to ask for its capabilities again, if it has not reported them.
        self._silences: dict[int, Backoff] = {}
        # Local epochs for which each node was asked.
        self._epochs: dict[int, Any] = {}
        self._measuring = False
        self._planner = ServerPlanner() if config.plan == "server" else None
        self.forget_requests = ForgetRequests()
        self._training = Train()

    @property
    def ledger(self) -> CoverageLedger | None:
        """The coverage ledger; None before the first round."""
        return self._ledger

    def serve(self, manifest: Manifest) -> None:
        """Set the served model: keep the coverage ledger if it is this model's, else restore one or begin anew."""
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

    def meet(self, grid: Grid, config: ConfigRecord, chosen: Mapping[int, Message]) -> None:
        """Ask the connected nodes for capabilities that are not known yet.

        A node that does not answer is asked less and less often. A node whose number of epochs has changed is asked
        again, because its round time has changed.

        Parameters
        ----------
        grid : Grid
            Sends to all connected nodes.
        config : ConfigRecord
            Config of the training messages; sent with the request.
        chosen : dict of int to Message
            The round's messages by node; these nodes get the config of their own message instead of ``config``.
        """
        if not self.config.needs_capabilities:
            return
        told = {
            node: next(iter(message.content.config_records.values()), config)
            for node, message in chosen.items()
        }
        for node, own in told.items():
            if node in self.capabilities and own.get(EPOCHS) != self._epochs.get(node):
                del self.capabilities[node]
                self._silences.pop(node, None)
        asked = [
            node
            for node in grid.get_node_ids()
            if node not in self.capabilities and self.try_to_ask(node)
        ]
        contents: dict[int, RecordDict] = {}
        questions = []
        for node in asked:
            own = told.get(node, config)
            self._epochs[node] = own.get(EPOCHS)
            content = contents.setdefault(id(own), self._question(own))
            questions.append(Message(content, node, "evaluate"))
        for reply in grid.send_and_receive(questions, timeout=_PATIENCE_SECONDS) if asked else ():
            self._learn(reply)

    def _question(self, config: ConfigRecord) -> RecordDict:
        scalars = {key: value for key, value in config.items() if not isinstance(value, list)}
        return RecordDict(
            {
                "evaluateins.parameters": ArrayRecord(),
                "evaluateins.config": ConfigRecord({**scalars, **self.task(Describe).to_config()}),
            }
        )

    def forget_capabilities(self) -> None:
        """Forget all capabilities, so that every node is asked again."""
        self.capabilities.clear()
        self._silences.clear()

    def fastest(self, nodes: Iterable[int], count: int) -> set[int]:
        """Return the ``count`` nodes that claim the shortest rounds."""

        def seconds(node: int) -> tuple[float, int]:
            known = self.capabilities.get(node)
            return (math.inf if known is None else known.full_round_seconds), node

        return set(sorted(nodes, key=seconds)[:count])

    def slow_down(self) -> None:
        """Reduce the clients' learning rates to a quarter from now on."""
        self.rate = max(_SLOWER * self.rate, _SLOWEST)

    def try_to_ask(self, node: int) -> bool:
        """Return whether to ask a node of unknown capabilities in this round; call it once a round.

        Every request counts as failed until the node answers, and lengthens the pause before the next one.
        """
        silence = self._silences.setdefault(node, Backoff(_LONGEST_PAUSE, tolerance=1))
        if not silence.is_due:
            silence.passed()
            return False
        silence.failed()
        return True

    def gather(self, nodes: Iterable[int]) -> Train:
        """Return the training task for a round with these nodes, with groups if the server chooses them."""
        deadline, names = self.deadline_seconds(), tuple[str, ...]()
        if self._planner is not None:
            cohort = [self.capabilities[node] for node in nodes if node in self.capabilities]
            names = self._planner.choose(cohort, self.importance, deadline)
        self._training = self.task(
            Train,
            deadline=deadline,
            groups=json.dumps(names) if names else "",
            keep_statistics=self.config.keeps_statistics,
            rate=self.rate,
        )
        return self._training

    def closed(self, asked: int, in_time: int) -> None:
        """Note how many of a round's clients answered in time.

        If the deadline follows from the devices' claims and nobody met it, the next round has no deadline, so that
        the time they really need becomes known.
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
        """Record a node's claimed capabilities; log a warning if they are invalid or the node failed."""
        try:
            if failure:
                raise UpdateError(failure)
            self.capabilities[node] = Capabilities.from_metrics(dict(metrics)).bounded(self.groups)
        except UpdateError as error:
            _LOG.warning("node %s sent no valid capabilities: %s", node, one_line(str(error)))

    def task(self, kind: type[_Task], **settings: Any) -> _Task:
        """Return a task for the model that the fleet has now."""
        model: dict[str, Any] = {
            "keep": self.config.sends_changes,
            "read": self.read,
            "cut": self.cut.group,
            "kept_head": self.kept_head,
        }
        return kind(**model | settings)

    def training(self, node: int) -> Train:
        """Return a node's training task in the round of the last `gather`."""
        if not self.config.forget:
            return self._training
        return replace(self._training, forgotten=self.forget_requests.met_of(node))

    def deadline_seconds(self) -> float | None:
        """Return the deadline of this round in seconds; None for no limit."""
        if self.config.deadline is None or self._measuring:
            return None
        times = (
            max(known.full_round_seconds, self.availability.least_seconds(node))
            for node, known in self.capabilities.items()
        )
        return self.config.deadline.among(times)

    def trained(self, node: int, update: PartialUpdate) -> dict[str, float]:
        """Record which tensors a node trained; return how often it trained each tensor in earlier rounds.

        This round is not counted, because it would overestimate the probability of the tensors that the node
        trained, and make their inverse-probability weights too small.
        """
        assert self._ledger is not None
        known = self.capabilities.get(node)
        device = _UNKNOWN if known is None else known.device
        before = self._ledger.probabilities(str(node))
        self._ledger.record(str(node), device, update.deltas)
        return before

    def weigh(self, reported: Iterable[Mapping[str, float]]) -> None:
        """Update the fleet's moving average of importance with the clients' scores of a round."""
        if self._planner is None:
            return
        distributions = [each for each in reported if each]
        if not distributions:
            return
        names = sorted({name for distribution in distributions for name in distribution})
        # fsum rounds once, so that the order of answers does not matter.
        mean = {
            name: math.fsum(distribution.get(name, 0.0) for distribution in distributions)
            / len(distributions)
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
        """Return the state to be stored."""
        return FleetState(
            self._stored if self._ledger is None else self._ledger.to_state(),
            None if self._planner is None else self._planner.to_state(),
            self.cut.group, self.forget_requests.to_state(), self.kept_head, self.rate, dict(self.importance),
        )  # fmt: skip

    def restore(self, state: FleetState) -> None:
        """Restore what `to_state` returned; the ledger follows when the model is known."""
        self._stored, self._ledger = state.coverage, None
        if self._planner is not None and state.plan is not None:
            self._planner.restore(state.plan)
        self.cut.restore(state.cut)
        self.forget_requests.restore(state.requests)
        self.kept_head, self.rate = state.kept_head, state.rate
        self.importance = dict(state.importance)


def _possible(importance: Mapping[str, float], groups: GroupNames | None) -> dict[str, float]:
    """Return the importance of groups that the model can have, at most as many as it can have."""
    most = _MOST_GROUPS if groups is None else groups.most
    known = {name: score for name, score in importance.items() if groups is None or name in groups}
    if len(known) <= most:
        return known
    largest = sorted(known, key=lambda name: (-known[name], name))[:most]
    return {name: known[name] for name in sorted(largest)}
