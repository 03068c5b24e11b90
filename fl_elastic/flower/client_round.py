"""A client's work for one message: the model with the server's weights, the batches, and the settings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ModelError
from fl_elastic.flower.tasks.task import EPOCHS, RoundTask, number_in
from fl_elastic.flower.tasks.train import Train
from fl_elastic.given import whole
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import ExampleCounter, map_tensors
from fl_elastic.groups.forward import tensor_bytes
from fl_elastic.groups.loss_settings import example_counter
from fl_elastic.groups.model_state import ModelState
from fl_elastic.losses import squared_outputs
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import model_device, profile_key
from fl_elastic.training import (
    ElasticTrainer,
    FitReport,
    ForwardOptions,
    TrainablePart,
    TrainerOptions,
)
from fl_elastic.training.costs import passes_above_cut
from fl_elastic.training.loader import LoaderSize, first_batches, loader_size
from fl_elastic.update import CODECS, Manifest, PartialUpdate, weights_of

if TYPE_CHECKING:
    from fl_elastic.closed_form.head_sums import HeadSums
    from fl_elastic.flower.client import ElasticClient
    from fl_elastic.update.dampening import SquaredGradients

    Squares: TypeAlias = tuple[SquaredGradients, SquaredGradients | None]


Configure = Callable[[torch.optim.Optimizer, dict[str, Any]], object]


@dataclass(frozen=True, eq=False)
class RoundData:
    """Model, loss and data of a client with loaders; for a stream see `fl_elastic.flower.stream_data.StreamData`.

    Attributes
    ----------
    manifest : Manifest
        Manifest of the server's model.
    model : nn.Module
        The model that is trained and evaluated.
    batches, tests : iterable of batches
        Training and test data.
    loss_fn : callable
        Loss of ``batches``.
    """

    manifest: Manifest
    model: nn.Module
    batches: Iterable[Batch]
    tests: Iterable[Batch]
    loss_fn: LossFn

    keeps_features: ClassVar[bool] = False
    """Whether the batches are features already, so that no frozen prefix runs."""
    one_pass: ClassVar[bool] = False
    """Whether a round makes only one pass, because a second one would draw the same samples."""

    def examples(self, *, of_server: bool = False) -> Iterable[Batch]:
        """Return batches that hold each example once; ``of_server`` restricts them to the server's classes."""
        return self.batches

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the weights of the model in the server's form."""
        return weights_of(self.model, self.manifest, self.manifest.names)

    def update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return the update of a fit that started from this version of the server's model."""
        return trainer.update(version)

    def known_sums(self) -> HeadSums | None:
        """Return the sums for a head in closed form if they are known without a pass over the examples."""
        return None

    def in_server_order(self, sums: HeadSums) -> HeadSums:
        """Return the sums over `examples` of the server's classes, arranged by the server's outputs."""
        return sums

    def squares(self, compute: Callable[[LossFn], Squares]) -> Squares:
        """Return the squared gradients ``compute(loss_fn)``, for a loss over the outputs of the server's model."""
        return compute(squared_outputs)

    def finish(self, task: RoundTask, report: FitReport | None) -> dict[str, Any]:
        """Finish a successful task; return further metrics for the server. Data of loaders need neither."""
        return {}


@dataclass(frozen=True, eq=False)
class ClientRound:
    """One task on one client: the client's settings as the task changes them, and the costs on this device.

    Attributes
    ----------
    client : ElasticClient
        The client, with the settings of its owner.
    task : RoundTask
        What the server asks for.
    data : RoundData
        Model and batches.
    version : int
        Version of the server's model.
    config : mapping
        Config of the message, with the settings of the server's user.
    arrived : float
        When the message came, by `time.perf_counter`.
    """

    client: ElasticClient
    task: RoundTask
    data: RoundData
    version: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def budget(self) -> Budget:
        """Budget of the task: with the server's deadline, unless the device's own is earlier.

        Plans count bytes in fp32, so bandwidth and uplink are divided by the codec's ``share``, its bytes per byte
        of fp32.
        """
        own = self.client.budget
        limits = [
            deadline for deadline in (own.deadline, self.task.deadline) if deadline is not None
        ]
        share = CODECS.make(self.client.codec).share
        return replace(
            own,
            deadline=min(limits, default=None),
            bandwidth=own.bandwidth and own.bandwidth / share,
            uplink=own.uplink and own.uplink / share,
        )

    @property
    def budget_left(self) -> Budget:
        """What is left of the budget; if time is measured, its deadline began when the message arrived.

        Raises
        ------
        BudgetError
            If the deadline has passed.
        """
        budget, timing = self.budget, self.client.options.timing
        if budget.deadline is None or not timing.closed_loop or timing.clock == "cpu":
            return budget
        passed = time.perf_counter() - self.arrived
        if passed >= budget.deadline:
            raise BudgetError(
                f"deadline {budget.deadline:.3g} s has passed before the first step: the message arrived "
                f"{passed:.3g} s ago; allow more time, or leave this device out of the round"
            )
        return budget.after(passed, 0.0, 0)

    @property
    def epochs(self) -> int:
        """Local epochs of a round, as an int: the server's config may hold 2.0."""
        from fl_elastic.training.options import whole_epochs

        asked = self.config.get(EPOCHS, self.client.epochs)
        return whole_epochs(whole(asked) or asked)

    @cached_property
    def options(self) -> TrainerOptions:
        """The trainer's options; only for training do seed and proximal term depend on the server's config."""
        client, task = self.client, self.task
        said = self.config if isinstance(task, Train) else {}
        options = round_options(client.options, task)
        name = client.client_id or _fallback_id(self.data.batches)
        if task.kept_head:
            # The server names the head as in the model's state, which may differ from the module's name.
            kept = _module_name(self.data.model, task.kept_head)
            options = replace(options, part=replace(options.part, kept_head=kept))
        return replace(
            options,
            seed=_seed_of(options.seed, name, int(said.get("server-round", 0))),
            proximal=max(number_in(said, "proximal-mu", 0.0), options.proximal),
            forward=self.forward(bool(options.part.cut)),
        )

    def forward(self, below_cut: bool) -> ForwardOptions | None:
        """Return how the frozen prefix runs; with a cut its features are kept in the state folder, if any."""
        if self.data.keeps_features:
            return None
        forward, state = self.client.options.forward, self.client.state
        if forward is None and below_cut:
            forward = ForwardOptions(feature_bytes=self.client.feature_bytes)
        if forward is None or forward.path is not None:
            return forward
        if not forward.feature_bytes:
            # An earlier setting may have allowed features: delete them.
            state.forget_features()
            return forward
        return replace(forward, path=state.features)

    @cached_property
    def optimizer_fn(self) -> OptimizerFn:
        """Function that makes the optimiser, with the server's settings if the task is to train."""
        client, task = self.client, self.task
        if not isinstance(task, Train):
            return client.optimizer_fn
        return round_optimizer(client.optimizer_fn, task, self.config, client.configure)

    def batches(self, count: int = 1, of: Iterable[Batch] | None = None) -> list[Batch]:
        """Return the first ``count`` batches of ``of``, or of the training data."""
        loader = self.data.batches if of is None else of
        return first_batches(loader, count, model_device(self.data.model), self._counter)

    def size(self, batches: Iterable[Batch] | None = None) -> LoaderSize:
        """Return the number of batches and examples of ``batches``, or of the training data, as far as known."""
        batches = self.data.batches if batches is None else batches
        return loader_size(batches, self.batches(1, batches)[0], self._counter)

    @property
    def _counter(self) -> ExampleCounter:
        return example_counter(self.data.loss_fn, self.client.options.count_examples)

    def known_profile(self) -> CostProfile | None:
        """Return the cost profile, if one is known."""
        model = self.data.model
        return self.client.state.profile(
            lambda: profile_key(model, self.batches()[0], self.optimizer_fn), model
        )

    def costs(self, options: TrainerOptions | None = None) -> CostProfile:
        """Return the cost profile; an unknown one is estimated, with these options, and kept."""
        options, profile = options or self.options, self.known_profile()
        if profile is None:
            # Imported here: needed once in a client's life.
            from fl_elastic.profiling.estimate import estimate_profile

            profile = estimate_profile(
                self.data.model, self.data.loss_fn, self.batches()[0],
                optimizer_fn=self.optimizer_fn, clock=options.timing.clock,
                memory=self.client.budget.memory, prefix=options.forward is not None,
            )  # fmt: skip
            self.client.state.keep_profile(profile, self.data.model)
        return profile

    def passes(self, profile: CostProfile, examples: int) -> int:
        """Return the factor for a round's epochs that makes it take as long with a cut as without."""
        if self.data.one_pass:
            return 1
        return passes_above_cut(profile, self.options, examples, self.client.budget.speedup or 1.0)


def _seed_of(seed: int, client: str, server_round: int) -> int:
    """Return a different seed for each client in each round.

    >>> len({_seed_of(0, client, number) for client in "abc" for number in range(5)})
    15
    """
    text = f"{seed}/{client}/{server_round}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _fallback_id(loader: Iterable[Batch]) -> str:
    """Return a fallback client id: a digest of the first example, or empty if it cannot be read."""
    dataset = getattr(loader, "dataset", None)
    try:
        first = dataset[0] if dataset is not None else loader[0]  # type: ignore[index]
    # A dataset may rely on the initialisation of its loader's workers, and then fail here in any way.
    except Exception:
        return ""
    digest = hashlib.blake2b(digest_size=8)

    def note(tensor: Tensor) -> Tensor:
        digest.update(tensor_bytes(tensor))
        return tensor

    map_tensors(note, first)
    return digest.hexdigest()


def _module_name(model: nn.Module, layer: str) -> str:
    """Return the name of the module whose weight is called ``layer.weight`` in the model's state."""
    try:
        weight = ModelState.of(model).parameter_of(f"{layer}.weight")
    except ModelError:
        return layer
    return weight.rpartition(".")[0]


def round_options(options: TrainerOptions, task: RoundTask) -> TrainerOptions:
    """Return a client's options with the task's settings of the round; the seed is the client's own."""
    training, own = task if isinstance(task, Train) else Train(), options.part
    part = TrainablePart(
        cut=task.cut or own.cut,
        kept_head=task.kept_head or own.kept_head,
        keep_statistics=training.keep_statistics or own.keep_statistics,
    )
    # If the server chooses the groups, the client adds no full updates of its own.
    every = 0 if training.groups else options.full_update_every
    return replace(options, part=part, full_update_every=every)


def _usual_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate that all groups of an optimiser have by default, else the first group's, else 0."""
    rates: list[Any] = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # If every group has a rate of its own, the class's default applies to none.
    common: Any = getattr(optimizer, "defaults", {}).get("lr")
    return float(common if common in rates else next(iter(rates), 0.0))


def round_optimizer(
    optimizer_fn: OptimizerFn,
    task: Train,
    config: Mapping[str, Any],
    configure: Configure | None,
) -> OptimizerFn:
    """Return a function that makes the client's optimiser with the server's settings.

    Parameters
    ----------
    optimizer_fn : callable
        Makes the client's optimiser.
    task : Train
        Gives the learning rate, or a factor on the optimiser's own.
    config : mapping
        Config of the message, for ``configure``.
    configure : callable, optional
        ``configure(optimizer, config)`` applies further settings, after the rate is set and before its factor.
    """
    if configure is None and task.rate == 1.0 and task.lr is None:
        return optimizer_fn

    # Keeps the signature, which decides whether parameters are passed with their names.
    @wraps(optimizer_fn)
    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = optimizer_fn(parameters)
        usual = _usual_rate(optimizer)
        for group in optimizer.param_groups if task.lr is not None and usual else ():
            if "lr" in group:
                group["lr"] = task.lr * (group["lr"] / usual)
        if configure is not None:
            configure(optimizer, dict(config))
        for group in optimizer.param_groups if task.rate != 1.0 else ():
            if "lr" in group:
                group["lr"] = task.rate * group["lr"]
        return optimizer

    return made
