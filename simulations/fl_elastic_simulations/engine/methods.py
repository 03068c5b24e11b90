"""Turn a method's table of a scenario into the server's strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fl_elastic.aggregation import RULES, SERVER_OPTIMIZERS, MergeOptions, ModelAverage
from fl_elastic.errors import RegistryError, ScenarioError, SettingError
from fl_elastic.flower.downlink import check_downlink_codec
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.round_config import Deadline, RoundConfig
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.planning import POLICIES
from fl_elastic.planning.importance import IMPORTANCES
from fl_elastic.registry import Factories
from fl_elastic.update import CODECS
from fl_elastic_simulations.engine.seeded_fedavg import SeededFedAvg
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection


def check_methods(scenario: Scenario) -> None:
    """Raise ScenarioError, with all problems at once, if a method is invalid, such as by an unknown plug-in."""
    problems = []
    for method in scenario.methods:
        plug_ins: tuple[tuple[Factories[Any], str | None], ...] = (
            (POLICIES, method.policy),
            (PEERS, method.peer),
            (IMPORTANCES, method.importance),
            (RULES, method.rule),
            (CODECS, method.codec),
            (SERVER_OPTIMIZERS, method.server_optimizer),
        )
        for registry, name in plug_ins:
            try:
                if name is not None:
                    registry.check(name)
            except RegistryError as error:
                problems.append(f"method {method.name}: {error}")
        try:
            check_downlink_codec(method.downlink_codec)
        except SettingError as error:
            problems.append(f"method {method.name}: {error}")
        if method.peer is not None and method.cut != "none":
            problems.append(
                f"method {method.name}: a peer knows no cut: choose a policy, or no cut"
            )
        try:
            _round_config(method)
        except SettingError as error:
            problems.append(f"method {method.name}: {error}")
        if method.read != "last" and method.peer is not None:
            problems.append(
                f"method {method.name}: a peer trains the model as it is: choose a policy, or read = 'last'"
            )
    if problems:
        raise ScenarioError("; ".join(problems))


def _round_config(method: MethodSection) -> RoundConfig:
    """Return the round settings of a method: where its head reads, and who plans its rounds."""
    solves = method.round_zero != "none"
    if not solves and method.read != "last":
        raise SettingError(
            f"read {method.read!r} is where a head in closed form reads: set round_zero='closed_form' as well"
        )
    plan: Any = method.plan
    return RoundConfig(read=method.read if solves else "none", plan=plan)


def method_strategy(
    scenario: Scenario,
    method: MethodSection,
    seed: int,
    on_round: Callable[[RoundRecord], None],
) -> PartialUpdates:
    """Return the server's strategy for a method; a peer's updates are merged as in its paper."""
    inner = SeededFedAvg(
        seed=seed,
        fraction_train=scenario.training.client_fraction,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=len(scenario.clients) if scenario.devices.always_there else 1,
    )
    peer = None if method.peer is None else PEERS.make(method.peer)
    optimizer = method.server_optimizer
    return PartialUpdates(
        inner,
        rule=method.rule if peer is None else peer.rule,
        merge=MergeOptions(
            weighting="examples" if peer is None else peer.weighting,
            normalise_steps=method.normalise_steps,
        ),
        config=replace(
            _round_config(method),
            deadline=_deadline(scenario, method),
            solve_every=method.solve_every,
            cut=method.cut,
        ),
        server_optimizer=None
        if optimizer is None
        else SERVER_OPTIMIZERS.make(optimizer, method.server_rate),
        average=ModelAverage(method.average) if method.average else None,
        codec=method.downlink_codec,
        on_round=on_round,
    )


def _deadline(scenario: Scenario, method: MethodSection) -> Deadline | None:
    section = scenario.deadline
    if section is None or method.stragglers == "wait":
        return None
    return Deadline(seconds=section.seconds, quantile=section.quantile)
