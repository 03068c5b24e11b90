"""The result of one method with one seed, built up round by round."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fl_elastic.errors import ScenarioError
from fl_elastic.groups import TensorGroup
from fl_elastic_simulations.engine.charges import Charges
from fl_elastic_simulations.unequal.clock import round_cost, round_seconds
from fl_elastic_simulations.unequal.fleet import Client

_SPENT = ("seconds", "uplink_bytes", "downlink_bytes")
_COSTS = ("simulated_seconds", "uplink_bytes", "downlink_bytes")
# Matches separate numbers; those within names, such as conv1 or fp32, distinguish reasons.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?!\w)")


@dataclass(frozen=True)
class ClientRound:
    """Result of one client in one round.

    Attributes
    ----------
    client : int
        Its index in the fleet.
    tensors : frozenset of str
        Names of the tensors that it trained.
    host_seconds : float
        Predicted cost of its steps on the measuring host, including probes and charges for choosing.
    step_seconds : float
        Measured median time of a step on the measuring host.
    steps, requested_steps : int
        Steps taken, and steps of a full round.
    uplink_bytes, downlink_bytes : int
        Bytes of its update, and of the messages sent to it.
    features_found, features_computed : int
        Numbers of examples whose features at the fleet's cut were kept already, and had to be computed.
    peak_bytes : float
        Most predicted bytes of a step beyond weights and inference; 0 if unknown.
    """

    client: int
    tensors: frozenset[str]
    host_seconds: float
    step_seconds: float
    steps: int
    requested_steps: int
    uplink_bytes: int
    downlink_bytes: int
    features_found: int = 0
    features_computed: int = 0
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one client in one round: median measured time, share of a full round, whether all was trained."""

    device: str
    seconds: float
    share: float
    everything: bool


@dataclass
class RunResult:
    """Result of one method with one seed.

    Attributes
    ----------
    method, seed : str, int
        The method and the seed.
    history : list of dict
        One row per round from 0 on, with accuracy and loss; cumulative since the start are simulated seconds,
        uplink and downlink bytes, and, if any, features found and computed.
    coverage : dict
        By device class an array rounds x groups: the share of the class's clients that trained the group.
    steps : list of MeasuredSteps
        Measured steps of each client in each round.
    accepted, rejected : int
        Numbers of updates that the server merged, and did not merge.
    scenario : str
        Fingerprint of the scenario, so that a run is not continued with results of another one.
    spent : dict
        Simulated seconds, uplink and downlink bytes of all rounds so far.
    client_seconds : float
        Simulated seconds of all clients together, including sending and receiving.
    choosing_seconds, profile_seconds : float
        Part of these that was charged for plans and probes, and for cost profiles.
    cuts : list of (float, str)
        Simulated second from which on the fleet's cut was at this group.
    features_found, features_computed : int
        Numbers of examples, over all clients, whose features at the cut were kept, and computed.
    clients : dict
        By client index: number of merged rounds, simulated seconds, bytes up and down.
    labels : list of list of int
        Number of training examples of each client by class.
    classes : list of (int, int)
        For each class, the correctly classified and all test examples at the last test.
    rejections : dict
        By reason, with numbers removed, the number of updates that were not merged in each round.
    peaks : dict
        By device class, the most predicted bytes of any step of a merged update.
    machines : dict
        On a cluster, the number of training messages that each machine handled.
    """

    method: str
    seed: int
    history: list[dict[str, float]] = field(default_factory=list)
    coverage: dict[str, list[list[float]]] = field(default_factory=dict)
    steps: list[MeasuredSteps] = field(default_factory=list)
    rejected: int = 0
    scenario: str = ""
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COSTS, 0.0))
    client_seconds: float = 0.0
    choosing_seconds: float = 0.0
    profile_seconds: float = 0.0
    cuts: list[tuple[float, str]] = field(default_factory=list)
    features_found: int = 0
    features_computed: int = 0
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    labels: list[list[int]] = field(default_factory=list)
    classes: list[tuple[int, int]] = field(default_factory=list)
    accepted: int = 0
    rejections: dict[str, dict[str, int]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    machines: dict[str, int] = field(default_factory=dict)

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds since the start, of all rounds recorded so far."""
        return self.spent["simulated_seconds"]

    def waited_until(self, until: float) -> None:
        """Advance simulated time to ``until``, unless it is past."""
        self.spent["simulated_seconds"] = max(self.simulated_seconds, until)

    def evaluated(
        self,
        server_round: int,
        accuracy: float,
        loss: float,
        *,
        spent: Mapping[str, float] | None = None,
        since: float | None = None,
    ) -> None:
        """Record the global model's quality after a round.

        Parameters
        ----------
        server_round, accuracy, loss
            The round, and the model's quality.
        spent : mapping of str to float, optional
            The costs at the time of the test; by default those so far.
        since : float, optional
            Simulated second at which the model was there, if it was tested later.
        """
        row = {"seed": self.seed, "round": server_round, "accuracy": accuracy, "loss": loss}
        if since is not None:
            row["since"] = since
        met = {"features_found": self.features_found, "features_computed": self.features_computed}
        kept = met if any(met.values()) else {}
        self.history.append(row | dict(self.spent if spent is None else spent) | kept)

    def cut_is(self, group: str) -> None:
        """Record the position of the fleet's cut; empty for no cut."""
        if group != (self.cuts[-1][1] if self.cuts else ""):
            self.cuts.append((self.simulated_seconds, group))

    def left_out(self, server_round: int, reasons: Iterable[str]) -> None:
        """Record why updates of a round were not merged; reasons that differ only in numbers count as one.

        >>> cell = RunResult("full", 0)
        >>> cell.left_out(2, ["needs 3.5 s, has 1 s", "needs 12 s, has 1 s", "no fp32"])
        >>> cell.rejections
        {'needs … s, has … s': {'2': 2}, 'no fp32': {'2': 1}}
        """
        for reason in reasons:
            rounds = self.rejections.setdefault(_NUMBER.sub("\N{HORIZONTAL ELLIPSIS}", reason), {})
            rounds[str(server_round)] = rounds.get(str(server_round), 0) + 1

    def charged(self, charges: Charges) -> None:
        """Record what all clients together were charged for choosing."""
        self.choosing_seconds += charges.choosing_seconds
        self.profile_seconds += charges.profile_seconds
        self.client_seconds += charges.lost_seconds

    def spend(
        self,
        done: Sequence[ClientRound],
        clients: Sequence[Client],
        left_out_bytes: int,
        rejected: int,
        at_least: float = 0.0,
        began: float | None = None,
    ) -> None:
        """Record the time and bytes of a round; they appear in the next evaluation's row.

        Parameters
        ----------
        done : sequence of ClientRound
            Results of the clients whose updates were merged.
        clients : sequence of Client
            The whole fleet.
        left_out_bytes : int
            Bytes sent to clients whose updates were not merged.
        rejected : int
            Number of clients that got the model and whose updates were not merged.
        at_least : float
            Simulated seconds that the server waited at least.
        began : float, optional
            Simulated second at which the round began; by default now.
        """
        costs = [
            round_cost(
                clients[each.client].device,
                host_seconds=each.host_seconds,
                uplink_bytes=each.uplink_bytes,
                downlink_bytes=each.downlink_bytes,
            )
            for each in done
        ]
        self.client_seconds += sum(cost.total for cost in costs)
        for each, cost in zip(done, costs, strict=True):
            spent = self.clients.setdefault(
                str(each.client), dict.fromkeys(("rounds", *_SPENT), 0.0)
            )
            spent["rounds"] += 1
            for name, value in zip(
                _SPENT, (cost.total, each.uplink_bytes, each.downlink_bytes), strict=True
            ):
                spent[name] += value
            if each.peak_bytes:
                device = clients[each.client].device.name
                self.peaks[device] = max(self.peaks.get(device, 0.0), each.peak_bytes)
        seconds = round_seconds((cost.total for cost in costs), told=at_least)
        self.waited_until((self.simulated_seconds if began is None else began) + seconds)
        self.spent["uplink_bytes"] += sum(each.uplink_bytes for each in done)
        self.spent["downlink_bytes"] += sum(each.downlink_bytes for each in done) + left_out_bytes
        self.accepted += len(done)
        self.rejected += rejected
        self.features_found += sum(each.features_found for each in done)
        self.features_computed += sum(each.features_computed for each in done)

    def cover(
        self, done: Sequence[ClientRound], clients: Sequence[Client], groups: Sequence[TensorGroup]
    ) -> None:
        """Record which groups a round of training covered on each device class, and its steps."""
        for name in dict.fromkeys(client.device.name for client in clients):
            of_device = [each for each in done if clients[each.client].device.name == name]
            shares = [
                sum(not each.tensors.isdisjoint(group.parameters) for each in of_device)
                / max(len(of_device), 1)
                for group in groups
            ]
            self.coverage.setdefault(name, []).append(shares)
        everything = {name for group in groups for name in group.parameters}
        for each in done:
            if each.step_seconds > 0:
                device = clients[each.client].device.name
                self.steps.append(
                    MeasuredSteps(
                        device,
                        each.step_seconds,
                        each.steps / each.requested_steps,
                        each.tensors >= everything,
                    )
                )

    def rows(self) -> list[dict[str, float]]:
        """Return a copy of the history."""
        return [dict(row) for row in self.history]

    def to_json(self) -> str:
        """Return the cell as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read the text of `to_json`; ScenarioError if it is anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["steps"] = [MeasuredSteps(**step) for step in fields["steps"]]
            fields["classes"] = [
                (int(right), int(tested)) for right, tested in fields.get("classes", ())
            ]
            fields["cuts"] = [(float(since), str(group)) for since, group in fields["cuts"]]
            return cls(**fields)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ScenarioError(f"a stored result cannot be read ({error}); delete it") from None
