"""Costs of choosing, apart from steps: measured once per simulation, beside the cost profile."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError, ScenarioError
from fl_elastic.losses import classification_loss
from fl_elastic.planning import POLICIES
from fl_elastic.profiling import CostProfile, estimate_profile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.state.files import write_atomically
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.head_costs import HeadCosts, measure_head_costs
from fl_elastic_simulations.engine.method_model import method_model
from fl_elastic_simulations.engine.workload import (
    client_batches,
    first_batch,
    optimizer_fn,
    scenario_model,
)
from fl_elastic_simulations.peers import PEERS, LocalTask
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection
from fl_elastic_simulations.unequal.fleet import Client

_REPEATS = 5
# Number of features of heads that choose their places.
_READ = 2048
# Largest share of a full round for which a choice is measured: with more time a device does not choose.
_ALMOST_EVERYTHING = 0.9


@dataclass(frozen=True)
class ChoosingCosts:
    """CPU seconds of one thread of the host; a device's time is this times its slowdown.

    Attributes
    ----------
    profile_seconds : float
        Seconds of estimating the costs of all tensor groups, which every client does once.
    plan_seconds : dict of str to dict of str to float
        By method and device class, the seconds of one plan under the budget of such a device.
    head_seconds : HeadCosts, optional
        Costs of a head in closed form, for clients and server; None if no method uses one.
    measured_for : dict of str to str
        By method, the `Scenario.fingerprint` for which its plan was measured.
    """

    profile_seconds: float = 0.0
    plan_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    head_seconds: HeadCosts | None = None
    measured_for: Mapping[str, str] = field(default_factory=dict)

    def plan(self, method: MethodSection, device: str) -> float:
        """Return the seconds of a plan; 0 for a method without a choice.

        Raises
        ------
        ScenarioError
            If they were not measured.
        """
        if not chooses(method):
            return 0.0
        try:
            return self.plan_seconds[method.name][device]
        except KeyError:
            raise ScenarioError(
                f"the time of choosing by method {method.name} on {device} was not measured: measure it anew with "
                "the cost profile"
            ) from None

    @property
    def of_a_head(self) -> HeadCosts:
        """Costs of a head in closed form.

        Raises
        ------
        ScenarioError
            If it was not measured.
        """
        if self.head_seconds is None:
            raise ScenarioError(
                "the time that a head in closed form takes was not measured: measure it anew with the cost profile"
            )
        return self.head_seconds

    def refuse_missing(self, method: MethodSection, devices: Iterable[str]) -> None:
        """Raise ScenarioError if a cost that a method is charged on one of these devices was not measured."""
        for device in devices:
            self.plan(method, device)
        if method.round_zero == "closed_form":
            _ = self.of_a_head

    def profile(self, method: MethodSection) -> float:
        """Return the seconds of a cost profile; 0 for a method that needs none."""
        return self.profile_seconds if chooses(method) else 0.0

    def to_json(self) -> str:
        """Return the seconds as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ChoosingCosts:
        """Read the text of `to_json`.

        Raises
        ------
        ScenarioError
            If it is anything else.
        """
        try:
            table = json.loads(text)
            of_a_head = table.get("head_seconds")
            return cls(
                profile_seconds=float(table["profile_seconds"]),
                plan_seconds={
                    str(method): {str(device): float(taken) for device, taken in devices.items()}
                    for method, devices in table["plan_seconds"].items()
                },
                head_seconds=None
                if of_a_head is None
                else HeadCosts(
                    **{each.name: float(of_a_head[each.name]) for each in fields(HeadCosts)}
                ),
                measured_for={
                    str(method): str(of) for method, of in table.get("measured_for", {}).items()
                },
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ScenarioError(f"stored seconds of choosing cannot be read ({error})") from None

    def save(self, path: Path) -> None:
        """Write the costs to a file."""
        write_atomically(path, f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: Path) -> ChoosingCosts:
        """Read a file of `save`; ScenarioError if that fails."""
        try:
            return cls.from_json(path.read_text(errors="replace"))
        except OSError as error:
            raise ScenarioError(f"cannot read {path}: {error.strerror}") from None


def chooses(method: MethodSection) -> bool:
    """Return whether a method needs the costs of groups in order to choose among them.

    A method that trains everything in as many steps as fit only needs the time of a step, which a client observes.
    """
    if method.peer is not None:
        return PEERS.make(method.peer).needs_costs
    return method.budgeted and POLICIES.make(method.policy).reduces_uplink


def measure_choosing(
    scenario: Scenario,
    data_root: str | None,
    profile: CostProfile,
    known: ChoosingCosts | None = None,
) -> ChoosingCosts:
    """Measure the cost of choosing for each method of a scenario on this host, as time of one thread.

    Costs in ``known`` are not measured again, unless the method has been edited since.

    The results are medians of several calls: of an estimate of the costs, and of one plan under the time that each
    device class has, relative to the fastest. Probes of importance are not included: their passes are in the
    profile.
    """
    for method in scenario.methods:
        if method.peer is None:
            # Otherwise every client would refuse in every round.
            POLICIES.make(method.policy).refuse_misfit(profile)
    batch = first_batch(scenario, data_root)
    make_optimizer = optimizer_fn(scenario.training)
    known = known or ChoosingCosts()
    prints = {each.name: scenario.fingerprint(each) for each in scenario.methods}
    choosing = [
        each
        for each in scenario.methods
        if chooses(each) and known.measured_for.get(each.name) != prints[each.name]
    ]
    estimating = known.profile_seconds
    if choosing and not estimating:
        model = scenario_model(scenario, data_root, seed=0).train()
        estimating = _median_seconds(
            lambda: estimate_profile(
                model, classification_loss, batch, optimizer_fn=make_optimizer, clock="cpu"
            )
        )
    classes = {client.device.name: client for client in scenario.clients}
    fastest = min(client.device.slowdown for client in scenario.clients)
    plans = {
        method.name: {
            name: _median_seconds(_choice(scenario, data_root, profile, method, client, fastest))
            for name, client in classes.items()
        }
        for method in choosing
    }
    heads = known.head_seconds
    if heads is None and any(method.round_zero == "closed_form" for method in scenario.methods):
        model = scenario_model(scenario, data_root, seed=0).eval()
        # Clients refuse a model without a linear layer.
        for head in [each for each in model.modules() if isinstance(each, torch.nn.Linear)][-1:]:
            wide = any(method.read != "last" for method in scenario.methods)
            heads = measure_head_costs(model, _READ if wide else head.in_features, batch)
    measured_for = {**known.measured_for, **{name: prints[name] for name in plans}}
    return ChoosingCosts(estimating, {**known.plan_seconds, **plans}, heads, measured_for)


def _choice(
    scenario: Scenario,
    data_root: str | None,
    profile: CostProfile,
    method: MethodSection,
    client: Client,
    fastest: float,
) -> Callable[[], object]:
    """Return a function that makes a method's choice, in the time of a full round on the fastest device."""
    batches = client_batches(scenario, data_root, 0, client.index, 1)
    steps = len(batches) * scenario.training.local_epochs
    share = min(1 / client.speedup, fastest / client.device.slowdown, _ALMOST_EVERYTHING)
    allowed = share * steps * profile.full_step_seconds
    model = method_model(scenario, method, data_root, 0)
    if method.peer is not None:
        peer = PEERS.make(method.peer)
        task = LocalTask(
            model=model,
            loss_fn=classification_loss,
            optimizer_fn=optimizer_fn(scenario.training),
            batches=batches,
            epochs=scenario.training.local_epochs,
            profile=profile,
            allowed_seconds=allowed,
            server_round=1,
            base_version=0,
            clients=len(scenario.clients),
            client=client.index,
            seed=0,
        )
        return lambda: peer.rehearse(task)
    return _plan(scenario, method, profile, model, batches, Budget(
        deadline=allowed,
        bandwidth=client.device.uplink_bytes_per_second * client.device.slowdown,
    ))  # fmt: skip


def _plan(
    scenario: Scenario,
    method: MethodSection,
    profile: CostProfile,
    model: torch.nn.Module,
    batches: Batches,
    budget: Budget,
) -> Callable[[], object]:
    trainer = ElasticTrainer(
        model,
        classification_loss,
        optimizer_fn(scenario.training),
        budget=budget,
        policy=method.policy,
        profile=profile,
        options=TrainerOptions(
            importance=method.importance,
            timing=Timing(closed_loop=False),
        ),
    )
    first: Iterator[object] = iter(batches)
    trainer.planner.begin(
        profile, len(batches) * scenario.training.local_epochs, [next(first)], budget  # type: ignore[list-item]
    )  # fmt: skip
    return lambda: trainer.planner.plan(1.0)


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of several calls after a warm-up; a call that fails counts until it fails."""
    clock = clock_for(torch.device("cpu"), "cpu")
    taken = []
    for _ in range(_REPEATS + 1):
        started = clock()
        with contextlib.suppress(ElasticError):
            work()
        taken.append(clock() - started)
    return statistics.median(taken[1:])
