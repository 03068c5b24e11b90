"""The ClientApp of a simulation: each node plays the device of its partition number."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_elastic.budget import Budget
from fl_elastic.closed_form.head_sums_wire import decode_head_sums
from fl_elastic.errors import DatasetError, ElasticError, ScenarioError, TrainingError
from fl_elastic.flower.capabilities import Capabilities, GroupCosts
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.records import (
    ERROR,
    evaluate_reply,
    failure,
    read_instruction,
    train_reply,
)
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.rank_places import RankPlaces
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import DEADLINE, config_key, task_in
from fl_elastic.groups import Batch
from fl_elastic.profiling import CostProfile
from fl_elastic.readout.place import Reading
from fl_elastic.training import Timing, TrainablePart
from fl_elastic.training.costs import lasting_costs, passes_above_cut
from fl_elastic.training.lean_start import without_compiler
from fl_elastic.update import CODECS, Manifest
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.charges import Charges
from fl_elastic_simulations.engine.choosing import ChoosingCosts
from fl_elastic_simulations.engine.client_slot import FEATURE_BYTES, PEAK_BYTES, ClientSlot
from fl_elastic_simulations.engine.head_costs import HeadCosts
from fl_elastic_simulations.engine.method_model import method_model
from fl_elastic_simulations.engine.peer_client import CHOOSING, PeerClient
from fl_elastic_simulations.engine.supplied_grid import costs_in, files_in, with_files
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection
from fl_elastic_simulations.unequal.clock import in_time
from fl_elastic_simulations.unequal.fleet import Client
from fl_elastic_simulations.unequal.measuring import measuring_mod

CHARGES = "charged.json"
"""File in which a client records its charges."""
NO_DATA = "lacks the scenario's data"
"""Part of the answer of a client on a machine without the data."""
LATE = "past the deadline"
"""Part of the answer of a client whose update would come too late."""

READ, CUT, KEPT_HEAD = map(config_key, ("read", "cut", "kept_head"))
_LOG = logging.getLogger("fl_elastic")
_Reply = tuple[list[NDArray[Any]], int, dict[str, Any]]


def simulated_client_app() -> ClientApp:
    """Return a ClientApp that reads what to simulate from the server's messages."""
    app = ClientApp(mods=[measuring_mod])
    # If the server runs in this process, it measures costs before a client answers.
    without_compiler()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # Flower may run the app in another process than the one that made it.
        without_compiler()
        torch.set_num_threads(1)
        arrays, config = read_instruction("train", message.content)
        with with_files(message.content) as folder:
            if folder is not None:
                config["state-dir"] = str(folder)
            try:
                role = _Role.of(config, _partition(context), costs_in(message.content))
                packed, examples, metrics = role.fit(arrays)
            except Exception as error:
                packed, examples, metrics = [], 0, _said(error)
            metrics["client"] = _partition(context)
            content = train_reply(packed, examples, metrics)
            if folder is not None:
                content.update(files_in(folder))
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        """Report the device's capabilities: the server of a simulation evaluates by itself."""
        _, config = read_instruction("evaluate", message.content)
        try:
            role = _Role.of(config, _partition(context), costs_in(message.content))
            known = role.capabilities()
            reply = evaluate_reply(0.0, known.num_examples, known.to_metrics())
        except Exception as error:
            reply = evaluate_reply(0.0, 0, _said(error))
        return Message(reply, reply_to=message)

    return app


def _said(error: Exception) -> dict[str, Any]:
    """Return the failure that is reported for an error; an unexpected error is logged as well."""
    if isinstance(error, DatasetError):
        return failure(ScenarioError(f"{platform.node()} {NO_DATA}: {error}"))
    if not isinstance(error, ElasticError):
        _LOG.error("a simulated client failed: %r", error, exc_info=True)
    return failure(error)


def _partition(context: Context) -> int:
    return int(context.node_config.get("partition-id", 0))


@dataclass(frozen=True, eq=False)
class _Role:
    """The client that a node plays in one round."""

    slot: ClientSlot
    config: dict[str, Any]
    costs: Mapping[str, CostProfile]
    choosing: ChoosingCosts | None

    @classmethod
    def of(cls, config: dict[str, Any], index: int, costs: Mapping[str, CostProfile]) -> _Role:
        scenario = _scenario(str(config["scenario"]))
        data_root = str(config.get("data-root", "")) or os.environ.get("FL_ELASTIC_DATA_ROOT")
        return cls(
            slot=ClientSlot.of(scenario, config, index, data_root),
            config=config,
            costs=costs,
            choosing=_choosing(str(config.get("choosing", ""))),
        )

    @property
    def profile(self) -> CostProfile:
        """Costs of the model that is trained."""
        return self.costs[str(self.config.get(READ, ""))]

    @property
    def scenario(self) -> Scenario:
        return self.slot.scenario

    @property
    def method(self) -> MethodSection:
        return self.slot.method

    @property
    def client(self) -> Client:
        return self.slot.client

    @property
    def state_directory(self) -> Path:
        mine = Path(self.method.name) / str(self.slot.seed) / str(self.client.index)
        return Path(str(self.config["state-dir"])) / mine

    @property
    def charges_file(self) -> Path:
        return self.state_directory / CHARGES

    @property
    def _without_deadline(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key != DEADLINE}

    def capabilities(self) -> Capabilities:
        """Return the device's capabilities, in the device's own seconds."""
        batches, device = self.slot.batches(), self.client.device
        cut, head = (str(self.config.get(key, "")) for key in (CUT, KEPT_HEAD))
        options = self.slot.options(part=TrainablePart(cut, head))
        profile = lasting_costs(self.profile, options, batches.dataset_size)
        passes = passes_above_cut(self.profile, options, batches.dataset_size)
        return Capabilities(
            device=device.name,
            num_examples=batches.dataset_size,
            steps=len(batches) * self.scenario.training.local_epochs * passes,
            full_step_seconds=profile.full_step_seconds * device.slowdown,
            model_bytes=float(profile.parameter_bytes.sum()),
            # As fp32 bytes per second, like a real client: server plans weigh groups by their fp32 bytes.
            bandwidth=device.uplink_bytes_per_second / CODECS.make(self.method.codec).share,
            groups=GroupCosts.of(profile).slowed(device.slowdown),
        )

    def fit(self, arrays: list[NDArray[Any]]) -> _Reply:
        """Do the round's task; a fit is refused if its update would come too late."""
        task = task_in(self.config)
        match task:
            case RateCuts():
                return self._cut_worth(arrays)
            case RankPlaces():
                return self._places(arrays, task)
            case SolveHead():
                return self._sums(arrays, task)
        if not self.method.budgeted and self.client.memory_bytes is not None:
            self.slot.check_memory(self.profile)
        deadline = task.deadline
        if self.method.stragglers == "drop" and deadline is not None:
            needed = self.capabilities().full_round_seconds
            if not in_time(needed, deadline):
                raise TrainingError(
                    f"{LATE}: training takes {needed:.3g} s, the round {deadline:.3g} s"
                )
        charges, slowdown = Charges.load(self.charges_file), self.client.device.slowdown
        plan = 0.0
        profile = 0.0 if charges.fits else self._profile_seconds(deadline)
        if self.choosing is not None and self._limited(deadline):
            plan = self.choosing.plan(self.method, self.client.device.name)
        packed, examples, metrics = self._trained(arrays, deadline, profile, plan)
        lost = ERROR in metrics
        chosen = plan if lost else float(metrics.pop(CHOOSING))
        if profile or chosen:
            charges.add(profile * slowdown, chosen * slowdown, lost=lost)
            charges.save(self.charges_file)
        return packed, examples, metrics

    def _places(self, arrays: list[NDArray[Any]], task: RankPlaces) -> _Reply:
        """Send the sums that rank places; charge one pass over all places, or one over the named ones."""
        client = self.elastic_client()
        # Its time is simulated: the time of this host must not limit it.
        client.budget = Budget(memory=self.client.memory_bytes)
        client.train_loader = self.slot.batches(whole=True)
        packed, examples, metrics = client.fit(arrays, self._without_deadline)
        asked = min(task.examples, examples)
        reading = Reading.parse(task.places)
        if not reading.places:
            spent = self._head_costs.answering(asked * (1 + reading.mirrored))
        else:
            named = _inference_batch(self.costs[task.places])
            spent = asked / self.scenario.training.batch_size * named
        return packed, examples, metrics | _no_steps(spent)

    def _sums(self, arrays: list[NDArray[Any]], task: SolveHead) -> _Reply:
        """Send sums for a head in closed form; charge inference and the products of features."""
        client, batches = self.elastic_client(), self.slot.batches(whole=True)
        # Its time is simulated: the number of batches must not depend on the speed of this host.
        client.budget, client.train_loader = Budget(), self._passed_in_time(batches, task)
        # A client that keeps features at a cut needs a cost profile to find the cut.
        profile = self._first_profile() if task.cut else 0.0
        packed, summed, metrics = client.fit(arrays, self._without_deadline)
        if packed:
            sums = decode_head_sums(packed[0].tobytes(), Manifest.of(client.model))
            summed, features = sums.num_examples, len(sums.diagonal) - 1
            profile += self._inference_seconds(task, summed, metrics)
            profile += self._head_costs.sums(summed, features)
        return packed, batches.dataset_size, metrics | _no_steps(profile)

    def _inference_seconds(
        self, task: SolveHead, examples: int, metrics: Mapping[str, Any]
    ) -> float:
        """Return the host seconds of a pass over the examples, given how many features had to be computed."""
        per_batch = self.scenario.training.batch_size
        if not task.cut:
            return examples / per_batch * _inference_batch(self.profile)
        options = self.slot.options(part=TrainablePart(task.cut))
        above = lasting_costs(self.profile, options, examples)
        seconds = examples * float(above.forward_seconds[0])
        cut = self.profile.graph.cut_below(self.profile.graph.groups_above(task.cut) - 1)
        if cut is not None:
            place = self.profile.graph.cuts.index(cut)
            prefix = float(self.profile.cut_inference_seconds[place])
            seconds += prefix * float(metrics.get("features-computed", 0))
        return seconds / per_batch

    def _passed_in_time(self, batches: Batches, task: SolveHead) -> Iterable[Batch]:
        """Return the batches that the device can run through the model before the deadline, at least one."""
        if task.deadline is None or self.method.stragglers != "fit" or not self.method.budgeted:
            return batches
        profile = self.profile
        # In the first pass no features are kept yet.
        if self.slot.server_round:
            options = self.slot.options(part=TrainablePart(task.cut))
            profile = lasting_costs(profile, options, batches.dataset_size)
        each = float(profile.forward_seconds[0]) if task.cut else _inference_batch(self.profile)
        each *= self.client.device.slowdown
        count = max(1, int(task.deadline / each))
        return batches if count >= len(batches) else _Begun(batches, count)

    def _cut_worth(self, arrays: list[NDArray[Any]]) -> _Reply:
        """Report the worth of cuts; charge two full steps."""
        client, batches = self.elastic_client(), self.slot.batches(whole=True)
        client.train_loader = batches
        packed, examples, metrics = client.fit(arrays, self._without_deadline)
        spent = self._first_profile() + 2 * self.profile.full_step_seconds
        return packed, examples, metrics | _no_steps(spent)

    @property
    def _head_costs(self) -> HeadCosts:
        return HeadCosts() if self.choosing is None else self.choosing.of_a_head

    def _first_profile(self) -> float:
        """Charge the estimate of costs if this client has made none yet; return its host seconds."""
        charges = Charges.load(self.charges_file)
        if charges.fits:
            return 0.0
        seconds = self._profile_seconds(None)
        charges.add(seconds * self.client.device.slowdown, 0.0, lost=False)
        charges.save(self.charges_file)
        return seconds

    def _profile_seconds(self, deadline: float | None) -> float:
        """Return the host seconds of a first cost profile; a client with a cut always needs one to find the cut."""
        if self.choosing is None:
            return 0.0
        if self.method.cut != "none":
            return self.choosing.profile_seconds
        return self.choosing.profile(self.method) if self._limited(deadline) else 0.0

    def _trained(
        self, arrays: list[NDArray[Any]], deadline: float | None, profile: float, plan: float
    ) -> _Reply:
        """Train, charging these host seconds for the cost profile and for each plan."""
        try:
            if self.method.peer is not None:
                return self._peer_client(deadline, profile, plan).fit(arrays, self.config)
            client = self.elastic_client(profile, plan)
            packed, examples, metrics = client.fit(arrays, self._host_config())
        except DatasetError:
            raise
        except ElasticError as error:
            packed, examples, metrics = [], 0, {ERROR: str(error)}
        else:
            if client.report is not None:
                plans = [plan for _, plan in client.report.plans]
                metrics[CHOOSING] = client.report.choosing_seconds
                metrics[PEAK_BYTES] = max(plan.predicted_step_bytes for plan in plans)
        if ERROR in metrics and profile > 0 and deadline is not None:
            # The client spent its first fit on estimating costs, and was too late.
            metrics[ERROR] = f"{LATE}, in its first fit: {metrics[ERROR]}"
        return packed, examples, metrics

    def _limited(self, deadline: float | None) -> bool:
        """Return whether there is anything to choose: a client without limits trains everything."""
        fitting = deadline is not None and self.method.stragglers == "fit"
        if self.method.peer is not None:
            return fitting
        own = self.client.speedup > 1 or self.client.uplink_share is not None
        return self.method.budgeted and (fitting or own)

    def elastic_client(
        self, profile_seconds: float = 0.0, planning_seconds: float = 0.0
    ) -> ElasticClient:
        slot, batches = self.slot, self.slot.batches()
        read = str(self.config.get(READ, ""))
        model = method_model(self.scenario, self.method, slot.data_root, slot.seed, read)
        profile, epochs = self.profile, self.scenario.training.local_epochs
        budget = slot.budget(
            len(batches) * epochs * profile.full_step_seconds, float(profile.parameter_bytes.sum())
        )
        if self.scenario.deadline is not None:
            # The host trains faster than the device, so the device can send more per host second.
            device = self.client.device
            bandwidth = device.uplink_bytes_per_second * device.slowdown
            budget = replace(budget, bandwidth=bandwidth)
        return ElasticClient(
            model,
            batches,
            # The server of a simulation evaluates by itself.
            [],
            budget=budget,
            epochs=epochs,
            options=slot.options(
                timing=Timing(
                    closed_loop=False,
                    profile_seconds=profile_seconds,
                    planning_seconds=planning_seconds,
                ),
            ),
            profile=profile,
            state_dir=self.state_directory,
            feature_bytes=FEATURE_BYTES if self.method.keep_features else 0,
            **slot.for_client(),
        )

    def _host_config(self) -> dict[str, Any]:
        """Return the config with the deadline in host seconds, or without one if the server waits for all."""
        config, deadline = self._without_deadline, self.config.get(DEADLINE)
        if deadline is not None and self.method.stragglers == "fit" and self.method.budgeted:
            config[DEADLINE] = deadline / self.client.device.slowdown
        return config

    def _peer_client(self, deadline: float | None, profile: float, plan: float) -> PeerClient:
        capabilities, device = self.capabilities(), self.client.device
        allowed = float("inf")
        if deadline is not None and self.method.stragglers == "fit":
            sending = capabilities.model_bytes / capabilities.bandwidth
            allowed = (deadline - sending) / device.slowdown
        return PeerClient(
            peer=str(self.method.peer),
            model=method_model(self.scenario, self.method, self.slot.data_root, self.slot.seed),
            batches=self.slot.batches(),
            training=self.scenario.training,
            profile=self.profile,
            allowed_seconds=allowed,
            profile_seconds=profile,
            choosing_seconds=plan,
            place=(self.client.index, len(self.scenario.clients)),
            seed=self.slot.seed,
            codec=self.method.codec,
            state_directory=self.state_directory,
            check_memory=partial(self.slot.check_memory, self.profile),
        )


@dataclass(frozen=True, eq=False)
class _Begun:
    """The first batches of a pass over all of a client's data; its dataset size is that of all data."""

    batches: Batches
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return islice(iter(self.batches), self.count)

    @property
    def dataset_size(self) -> int:
        return self.batches.dataset_size


def _no_steps(host_seconds: float) -> dict[str, Any]:
    """Return the metrics of a client that did something else than train, for that many host seconds."""
    return {
        "predicted-seconds": host_seconds, "step-seconds": 0.0, "steps": 0, "requested-steps": 0,
    }  # fmt: skip


@lru_cache(maxsize=4)
def _scenario(text: str) -> Scenario:
    return Scenario.from_json(text)


@lru_cache(maxsize=4)
def _choosing(text: str) -> ChoosingCosts | None:
    """Return the costs of choosing that the server measured; None if nothing is charged."""
    return ChoosingCosts.from_json(text) if text else None


def _inference_batch(profile: CostProfile) -> float:
    """Return the seconds of a batch as inference: the forward time times the saving below the last cut."""
    plain, folded = profile.cut_plain_seconds, profile.cut_inference_seconds
    saved = float(folded[-1] / plain[-1]) if len(plain) and plain[-1] > 0 else 1.0
    return float(profile.forward_seconds[0]) * min(saved, 1.0)
