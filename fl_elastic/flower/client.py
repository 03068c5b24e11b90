"""A Flower ``NumPyClient`` that trains what its device can afford."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ElasticError, ModelError, TrainingError, UpdateError
from fl_elastic.flower._compat import NumPyClient
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client_round import (
    Configure,
    RoundData,
    round_budget,
    round_optimizer,
    round_options,
)
from fl_elastic.flower.client_state import ClientState
from fl_elastic.flower.records import (
    FORGET,
    HAVE,
    IMPORTANCE,
    MAY_TRAIN,
    PACKED,
    TENSORS,
    failure,
)
from fl_elastic.flower.tasks.task import Answer, RoundTask, task_in
from fl_elastic.flower.tasks.train import Train, read_groups
from fl_elastic.given import whole
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import ignored_class, map_tensors, split_batch, tensor_bytes
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.trainable import flags_of
from fl_elastic.losses import own_loss_or_cross_entropy
from fl_elastic.planning import POLICIES, Policy, PolicyMemory
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.optimizers import OptimizerFn, adds_noise, made_by
from fl_elastic.profiling.profile import model_device, profile_key
from fl_elastic.readout.place import places_of
from fl_elastic.training import (
    ElasticTrainer,
    FitReport,
    ForwardOptions,
    SelectionState,
    TrainerOptions,
)
from fl_elastic.training.batches import LoaderSize, first_batches, loader_size
from fl_elastic.training.costs import lasting_costs, passes_above_cut, with_prefix
from fl_elastic.training.evaluate import MetricsFn
from fl_elastic.training.trainer import check_parts, eager, whole_epochs
from fl_elastic.update import (
    CODECS,
    Manifest,
    PartialUpdate,
    decode,
    encode,
    load_weights,
)

_LOG = logging.getLogger("fl_elastic")


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
    # A dataset may need what its workers are given first, and may then fail in any way.
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


def _failure_metrics(error: Exception, what: str, config: dict[str, Any]) -> dict[str, Any]:
    """Log why a client could not do what it was asked; return the failure as metrics, or raise it.

    It is returned only to a server that reads it.
    """
    foreseen = isinstance(error, ElasticError)
    _LOG.error("cannot %s: %s", what, error if foreseen else repr(error), exc_info=not foreseen)
    if not config.get(PACKED):
        raise error
    return failure(error)


def _examples_to_forget(forget: Iterable[Batch] | None) -> Iterable[Batch] | None:
    """Return the examples to be forgotten; raise TrainingError if there are none or they can be read only once."""
    if forget is None:
        return None
    if iter(forget) is forget:
        raise TrainingError(
            "what is to be forgotten is read again until it is: pass a list or a DataLoader, not an iterator"
        )
    if next(iter(forget), None) is None:
        raise TrainingError("there is no batch to be forgotten: leave forget out")
    return forget


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class ElasticClient(NumPyClient):
    """Trains under a budget and sends only what it trained.

    Under `PartialUpdates` model and update travel as one packed buffer each. The client also works with a server
    that has not been changed: a strategy of Flower's own gets the whole model back. Strategies of
    ``flwr.serverapp`` need `elastic_client_app` for that, because Flower's adapter for a NumPyClient does not read
    what they send.

    Parameters
    ----------
    model : nn.Module
        On the device that it is trained on; its weights are replaced by the server's. If some parameters have
        ``requires_grad=False``, these are its frozen base, which does not travel; the client refuses to train if
        the server's base is another one.
    train_loader, test_loader : iterable of batches
        Re-iterable; batches are ``(inputs, targets)``, longer tuples that end with the targets, or dicts with
        ``labels``, see `fl_elastic.groups.batch.as_pair`.
    budget : Budget
        What one round may spend.
    policy : str or Policy
        A registered name, or an object with options of its own.
    loss_fn : callable
        ``loss_fn(outputs, targets)``; by default the loss that the model computes itself, as transformers do from
        ``labels``, or else the cross-entropy.
    optimizer_fn : callable
        ``optimizer_fn(parameters)``; a new optimiser is made each round. If the argument is called
        ``named_parameters``, it gets pairs of name and parameter. The server's config key ``lr`` replaces the
        optimiser's learning rate; parameter groups with rates of their own keep their ratio to it.
    configure : callable, optional
        ``configure(optimizer, config)`` applies other settings of the server's config, such as a weight decay, to
        an optimiser that was just made. Called for every optimiser, including those that cost estimates try out.
    forget : iterable of batches, optional
        Examples that the global model must forget, and that ``train_loader`` no longer holds; `forget` removes them
        from it. A server with ``RoundConfig(forget=True)`` forgets them after the next round; when `forgotten` is
        true they can be deleted.
    epochs : int
        Local epochs per round; the server's config key ``local-epochs`` overrides it. Above the fleet's cut there
        are more epochs, so that a round takes as long as if everything were trained.
    codec : str
        Codec of updates, see `fl_elastic.update.codecs`. What a lossy codec loses is added to the next update if
        that helps.
    options : TrainerOptions, optional
        Options of the trainer.
    profile : CostProfile, optional
        Measured costs, if available.
    device : str
        Class of the device; the server counts coverage per class.
    state_dir : path-like, optional
        Folder for what is kept between rounds: cost profile, importance, the losses of the codec and, if the server
        wants it, the model. A deployed client process lives for one message, so without a folder the first two are
        computed anew in every round. No two clients may share a folder; `elastic_client_app` gives each node its
        own.
    client_id : str
        Name of this client; with the run's seed and the round it determines the seed of its random choices.
        `elastic_client_app` takes it from Flower's context. If left out, a digest of the client's data is used.
    feature_bytes : int
        Bound on the features at the fleet's cut in ``state_dir``, as fp16, and the same again for the test data; 0
        keeps none. Features reveal as much as the data themselves: they stay on the device, and are wiped when a
        pass over all data does not meet their example.
    metrics_fn : callable, optional
        ``metrics_fn(outputs, targets)`` returns a dict of numbers for a test batch; their means over the examples
        are sent to the server. Accuracy is sent too, if outputs are class scores and targets are classes.

    Attributes
    ----------
    wish : iterable of batches or None
        Examples that the global model must forget.
    forgotten : bool
        Whether the server has confirmed that its model was made to forget `wish`.
    """

    why_reading_is_fixed: ClassVar[str] = ""
    """Why the server cannot choose where in the model its head reads; empty if it can."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Batch],
        test_loader: Iterable[Batch],
        *,
        budget: Budget,
        policy: str | Policy = "elastic",
        loss_fn: LossFn = own_loss_or_cross_entropy,
        optimizer_fn: OptimizerFn = _sgd,
        epochs: int = 1,
        codec: str = "fp32",
        options: TrainerOptions | None = None,
        profile: CostProfile | None = None,
        device: str = "",
        state_dir: str | Path | None = None,
        client_id: str = "",
        feature_bytes: int = 256 << 20,
        metrics_fn: MetricsFn | None = None,
        configure: Configure | None = None,
        forget: Iterable[Batch] | None = None,
    ) -> None:
        check_parts(model, loss_fn, optimizer_fn, budget)
        POLICIES.make(policy)
        CODECS.make(codec)
        self.model = model = eager(model)
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.budget = budget
        self.policy = policy
        self.loss_fn = loss_fn
        self.optimizer_fn = self._round_optimizer_fn = optimizer_fn
        self.configure = configure
        self.epochs = epochs
        self.metrics_fn = metrics_fn
        self.codec = codec
        self.feature_bytes = feature_bytes
        self.options = options or TrainerOptions()
        self.device = device
        self.report: FitReport | None = None
        self.client_id = client_id
        self.wish = _examples_to_forget(forget)
        self.forgotten = False
        self._wish_digest = ""
        # Result of `forget`, and the data that it was made from.
        self._without: tuple[object, Iterable[Batch], frozenset[int]] | None = None
        self._profile = profile
        self._flags = flags_of(model)
        self._arrived = time.perf_counter()
        self._data: RoundData | None = None
        # The given model may be one whose head already reads elsewhere.
        self._own_model, self._places = model, places_of(ModelState.of(model).tensors)
        self._own_manifest = Manifest.of(model).with_base(model)
        self._state = ClientState(
            None if state_dir is None else Path(state_dir), self._own_manifest
        )

    @property
    def manifest(self) -> Manifest:
        """The manifest of what travels."""
        return self._state.manifest

    def run_on(self, context: Context, state_dir: Path | None = None) -> None:
        """Be the client of this node: by its id, and in a state folder of its own, as far as none were given."""
        folder = self._state.directory or state_dir
        if not self.client_id:
            self.client_id = str(context.node_config.get("partition-id", context.node_id))
            folder = folder and folder / f"client-{self.client_id}"
        if folder != self._state.directory:
            self._state = ClientState(folder, self.manifest)

    @property
    def selection(self) -> SelectionState:
        """Importance of groups and how long each was left out, as remembered from earlier rounds."""
        return self._state.selection

    @selection.setter
    def selection(self, state: SelectionState) -> None:
        self._state.selection = state

    def forget(self, ids: Iterable[int]) -> None:
        """Take examples out of the training data, and have the global model forget them.

        From now on neither steps nor sums use these examples. With ``RoundConfig(forget=True)`` the server acts
        after the next round: a head in closed form is solved for without them, and what was trained by steps is
        dampened. Without it the head is free of them the next time that the server solves for it. A client that is
        made anew for each message has to be told each time.

        Parameters
        ----------
        ids : iterable of int
            Indices of examples in the dataset of ``train_loader``, or counted through its batches if it is a list;
            as they were before anything was forgotten.

        Raises
        ------
        TrainingError
            If an id is not one of an example, nothing would be left, or the loader does not say which examples it
            reads.
        """
        from fl_elastic.training.without import numbers_of, parted

        numbers, whole = numbers_of(ids), self.train_loader
        if not numbers:
            return
        known = self._without
        if known is not None and known[0] is self.train_loader:
            whole, numbers = known[1], known[2] | numbers
        rest, gone = parted(whole, numbers)
        self.train_loader, self._without = rest, (rest, whole, numbers)
        self.wish, self.forgotten, self._wish_digest = gone, False, ""

    def get_parameters(self, config: dict[str, Any]) -> list[NDArray[Any]]:
        """Return all tensors in the manifest's order."""
        del config
        return list(self.data.weights().values())

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Load the global model and do the server's task, which is training unless the config names another one.

        A failure (no data, a loss that is not finite, an error in the loader) is not raised but reported to the
        server in the metrics, so that the server can log the reason. An error that is not an `ElasticError` is also
        logged here with its traceback.
        """
        self._arrived = time.perf_counter()
        try:
            answer = self._do(task_in(config), parameters, config)
        except Exception as error:
            return [], 0, _failure_metrics(error, "train", config)
        return answer.arrays, answer.num_examples, answer.metrics

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Load the global model and return loss, number of examples, and metrics on the test loader.

        The metrics contain the accuracy only if it could be computed, see `fl_elastic.training.evaluate`. The
        server may ask for the device's capabilities instead (`fl_elastic.flower.tasks.describe`).
        """
        try:
            answer = self._do(task_in(config, "evaluate"), parameters, config)
        except Exception as error:
            return 0.0, 0, _failure_metrics(error, "evaluate", config)
        return answer.loss, answer.num_examples, answer.metrics

    @property
    def data(self) -> RoundData:
        """The data and model of the present task; between messages the client's own model and loaders."""
        return self._data or RoundData(
            self.manifest, self.model, self.train_loader, self.test_loader, self.loss_fn
        )

    @contextmanager
    def _opened(
        self, task: RoundTask, weights: Mapping[str, NDArray[Any]] | None
    ) -> Iterator[RoundData]:
        """Yield model and data for a task, with the server's weights loaded if they came."""
        if weights is not None:
            load_weights(self.model, self.manifest, weights)
        yield self.data

    @contextmanager
    def _working_on(self, data: RoundData) -> Iterator[None]:
        """Make ``data`` the present `data` inside the block."""
        before, self._data = self._data, data
        try:
            yield
        finally:
            self._data = before

    def _do(
        self, task: RoundTask, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> Answer:
        """Do a task with the model that came with it."""
        self._follow_flags()
        self._use_places(task.read)
        weights, version, metrics = None, 0, dict[str, Any]()
        if task.brings_model:
            weights, version, metrics = self._received(parameters, config, task)
        with self._opened(task, weights) as data, self._working_on(data):
            if task.reveals_data and adds_noise(made_by(self.optimizer_fn, data.model)):
                raise TrainingError(
                    "the optimiser adds noise for privacy, and the server asks for what comes from the data "
                    "without any: use read='none', cut='none' or 'fixed:GROUP', and no forgetting"
                )
            answer = task.answer(self, version, config)
            metrics |= data.finish(task, self.report)
        return replace(answer, metrics=answer.metrics | metrics)

    def train(self, task: Train, version: int, config: Mapping[str, Any]) -> Answer:
        """Train what the budget allows, from the model as it is; return the update.

        Parameters
        ----------
        task : Train
            The server's task for the round.
        version : int
            Version of the model.
        config : mapping
            Config of the message: proximal weight, round, epochs, and what ``configure`` reads.
        """
        data = self.data
        if self.wish is not None and not self.forgotten:
            # What a policy remembers may come from examples that must be forgotten.
            self._state.selection.memory = PolicyMemory()
        options = self.options_for(
            task, float(config.get("proximal-mu", 0.0)), int(config.get("server-round", 0))
        )
        self._round_optimizer_fn = round_optimizer(self.optimizer_fn, task, config, self.configure)
        # An unknown profile is estimated inside the fit, where its time counts against the budget.
        asked = config.get("local-epochs", self.epochs)
        # A server's config may hold 2.0.
        profile, epochs = self.known_profile(), whole_epochs(whole(asked) or asked)
        if profile is not None and options.part.cut:
            epochs *= self._passes(profile, options, self.size().examples)
        policy = self.policy
        if task.groups:
            # Imported here: only needed if the server chooses for all.
            from fl_elastic.planning.plain import GivenPolicy

            policy = GivenPolicy(read_groups(task.groups))
        trainer = ElasticTrainer(
            data.model, data.loss_fn, self._round_optimizer_fn,
            budget=self._since_arrival(self.budget_for(task)),
            policy=policy, profile=profile, options=options, state=self._state.selection,
            manifest=self.manifest,
        )  # fmt: skip
        data.model.train()
        self.report = trainer.fit(data.batches, epochs=epochs)
        update = data.update(trainer, version)
        self._state.keep_selection(wanted=trainer.planner.policy.needs_coverage)
        if trainer.profile is not None and trainer.profile is not self._profile:
            # The fit has added the costs of the policy's modes.
            self._profile = trainer.profile
            self._state.keep_profile(trainer.profile, data.model)
        metrics = self._training_metrics(task, trainer, self.report)
        if config.get(PACKED):
            packed = self._encoded(update, self.codec)
            return Answer.packed(packed, update.num_examples, metrics)
        weights = data.weights()
        if task.groups:
            # The server sums the same tensors of all clients, and sees no single client's.
            trained = [name for name in self.manifest.names if name in update.deltas]
            metrics[TENSORS] = json.dumps([self.manifest.index[name] for name in trained])
            weights = {name: weights[name] for name in trained}
        return Answer(list(weights.values()), update.num_examples, metrics)

    def _training_metrics(
        self, task: Train, trainer: ElasticTrainer, report: FitReport
    ) -> dict[str, Any]:
        """Return the metrics of a fit that are sent with its update."""
        metrics = report.to_metrics()
        if task.cut and report.forward is not None:
            metrics |= report.forward.to_metrics()
        if task.cut or task.kept_head:
            indices = sorted(self.manifest.index[name] for name in trainer.may_train)
            metrics[MAY_TRAIN] = json.dumps(indices)
        wish = self._wish(task)
        if wish:
            metrics[FORGET] = wish
        if task.groups and trainer.state.complete:
            # Shares measured on a part of the model would make the rest look worthless. A negative score counts as
            # zero: it is no reason to disbelieve the other scores.
            worth = {name: max(score, 0.0) for name, score in report.importance.items()}
            metrics[IMPORTANCE] = json.dumps(worth)
        return metrics

    def _follow_flags(self) -> None:
        """Adapt to the owner's present ``requires_grad`` flags, in a client that lives for several rounds."""
        flags = flags_of(self.model)
        if flags != self._flags:
            self._flags = flags
            manifest = Manifest.of(self.model)
            self._state.go_by(
                replace(manifest, base=self._own_manifest.base)
                if self._places
                else manifest.with_base(self.model)
            )

    def _use_places(self, places: str) -> None:
        """Use a model whose head reads these places; if there are none, the model as it was given."""
        if places == self._places:
            return
        if self.why_reading_is_fixed:
            raise TrainingError(self.why_reading_is_fixed)
        # Imported here: only clients whose head moves need it.
        from fl_elastic.readout.first_pass import FirstPass
        from fl_elastic.readout.readout import Readout

        model, base = self._own_model, self._own_manifest.base
        if places:
            inputs = split_batch(self._batches()[0])[0]
            model = Readout(model, places, inputs, FirstPass.of(model, (inputs, inputs)).outputs)
        self.model, self._places, self._profile = model, places, None
        self._flags = flags_of(model)
        # The frozen base is the same as in the given model.
        self._state.go_by(replace(Manifest.of(model), base=base) if places else self._own_manifest)

    def _wish(self, task: Train) -> str:
        """Return the digest of what must be forgotten; empty if nothing must, or the server has confirmed it."""
        if self.wish is None or self.forgotten:
            return ""
        if not self._wish_digest:
            from fl_elastic.methods.dampening.forget import digest_of

            self._wish_digest = digest_of(self.wish, self.client_id)
        self.forgotten = task.forgotten == self._wish_digest
        if self.forgotten:
            _LOG.info("the server's model was made to forget the examples of %s", self._wish_digest)
        return "" if self.forgotten else self._wish_digest

    def cut_worth(self, task: RoundTask) -> dict[str, float]:
        """Return the gain of training down to each place, by the deepest group that is trained."""
        from fl_elastic.training.cut_worth import cut_worth

        # With options that keep features, because features will be kept whichever cut is chosen.
        options = replace(self.options_for(task), forward=self._forward(True))
        model = self.data.model
        batches = self._batches(2)
        known = self.costs(options)
        self._profile = with_prefix(known, model, batches[0], options)
        self._state.keep_profile(self._profile, model)
        return cut_worth(
            model, self.data.loss_fn, batches, self._profile, options, self.size().examples,
            optimizer_fn=self._round_optimizer_fn, memory=self.budget.memory,
        )  # fmt: skip

    def size(self, batches: Iterable[Batch] | None = None) -> LoaderSize:
        """Return the number of batches and examples of ``batches``, or of the training data, as far as known."""
        batches = self.data.batches if batches is None else batches
        first = self._batches(1, batches)[0]
        ignored = ignored_class(self.data.loss_fn)
        return loader_size(batches, first, self.options.count_examples, ignored=ignored)

    def _batches(self, count: int = 1, batches: Iterable[Batch] | None = None) -> list[Batch]:
        data = self.data
        return first_batches(
            data.batches if batches is None else batches, count, model_device(data.model),
            self.options.count_examples, ignored_class(data.loss_fn),
        )  # fmt: skip

    def _encoded(self, update: PartialUpdate, codec: str) -> bytes:
        """Return the packed update, corrected by what earlier updates lost if the codec is lossy."""
        if not CODECS.make(codec).lossy:
            return encode(update, self.manifest, codec)
        feedback = self._state.feedback
        corrected = feedback.corrected(update)
        packed = encode(corrected, self.manifest, codec)
        feedback.sent(corrected, decode(packed, self.manifest))
        self._state.keep_feedback()
        return packed

    def capabilities(self, task: RoundTask | None = None) -> Capabilities:
        """Return what this device can do in a round with this task; unknown costs are estimated."""
        task = task or Train()
        if self._data is None:
            with self._opened(task, None) as data, self._working_on(data):
                return self.capabilities(task)
        options, size = self.options_for(task), self.size()
        profile = self.costs(options)
        return Capabilities.of(
            lasting_costs(profile, options, size.examples), self.budget_for(Train()),
            device=self.device, num_examples=size.examples,
            steps=size.batches * self.epochs * self._passes(profile, options, size.examples),
        )  # fmt: skip

    def _passes(self, profile: CostProfile, options: TrainerOptions, examples: int) -> int:
        """Return the factor for a round's epochs that makes it take as long with a cut as without."""
        if self.data.one_pass:
            return 1
        return passes_above_cut(profile, options, examples, self.budget.speedup or 1.0)

    def forget_profile(self) -> None:
        """Forget the costs, so that they are measured again when they are needed next."""
        self._profile = None
        self._state.forget_profile()

    def budget_for(self, task: RoundTask) -> Budget:
        """Return the budget of a round with this task."""
        return round_budget(self.budget, task, CODECS.make(self.codec).share)

    def _since_arrival(self, budget: Budget) -> Budget:
        """Return the rest of a budget whose deadline began when the message arrived, if time is measured."""
        if (
            budget.deadline is None
            or not self.options.timing.closed_loop
            or self.options.timing.clock == "cpu"
        ):
            return budget
        passed = time.perf_counter() - self._arrived
        if passed >= budget.deadline:
            raise BudgetError(
                f"deadline {budget.deadline:.3g} s has passed before the first step: the message arrived "
                f"{passed:.3g} s ago; allow more time, or leave this device out of the round"
            )
        return budget.after(passed, 0.0, 0)

    def options_for(
        self, task: RoundTask, proximal: float = 0.0, server_round: int = 0
    ) -> TrainerOptions:
        """Return the trainer's options for a round with this task."""
        options = round_options(self.options, task)
        client = self.client_id or _fallback_id(self.data.batches)
        if task.kept_head:
            # The server knows the head by its tensors' names in the state, which may differ from the module's name.
            kept = _module_name(self.data.model, task.kept_head)
            options = replace(options, part=replace(options.part, kept_head=kept))
        return replace(
            options,
            seed=_seed_of(options.seed, client, server_round),
            proximal=max(proximal, options.proximal),
            forward=self._forward(bool(options.part.cut)),
        )

    def _forward(self, below_cut: bool) -> ForwardOptions | None:
        """Return how the frozen prefix runs; with a cut its features are kept in the state folder, if any."""
        if self.data.keeps_features:
            return None
        forward = self.options.forward
        if forward is None and below_cut:
            forward = ForwardOptions(feature_bytes=self.feature_bytes)
        if forward is None or forward.path is not None:
            return forward
        if not forward.feature_bytes:
            # An earlier setting may have allowed features: delete them.
            self._state.forget_features()
            return forward
        return replace(forward, path=self._state.features)

    def _received(
        self, parameters: list[NDArray[Any]], config: dict[str, Any], task: RoundTask
    ) -> tuple[dict[str, NDArray[Any]], int, dict[str, Any]]:
        """Return the received weights, their version, and metrics for the reply; packed or as a list of arrays."""
        if not config.get(PACKED):
            return self._state.received_list(parameters, self.model), 0, {}
        if len(parameters) != 1:
            raise UpdateError(f"expected one packed buffer, got {len(parameters)} arrays")
        weights, version = self._state.received(parameters[0].tobytes(), self.model)
        keeps = task.keep and self._state.keep_model(weights, version)
        return weights, version, {HAVE: version} if keeps else {}

    def known_profile(self) -> CostProfile | None:
        """Return the cost profile from memory or disk, if there is one."""
        if self._profile is None:
            model = self.data.model
            key = profile_key(model, self._batches()[0], self._round_optimizer_fn)
            self._profile = self._state.profile(key, model)
        return self._profile

    def costs(self, options: TrainerOptions) -> CostProfile:
        """Return the cost profile; an unknown one is estimated and kept."""
        profile = self.known_profile()
        if profile is None:
            # Imported here: needed once in a client's life.
            from fl_elastic.profiling.estimate import estimate_profile

            self._profile = profile = estimate_profile(
                self.data.model, self.data.loss_fn, self._batches()[0],
                optimizer_fn=self._round_optimizer_fn, clock=options.timing.clock,
                memory=self.budget.memory, prefix=options.forward is not None,
            )  # fmt: skip
            self._state.keep_profile(profile, self.data.model)
        return profile
