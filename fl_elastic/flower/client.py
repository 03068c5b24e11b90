"""A Flower ``NumPyClient`` that trains what its device can afford."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError, TrainingError, UpdateError
from fl_elastic.flower._compat import NumPyClient
from fl_elastic.flower.client_round import ClientRound, Configure, RoundData
from fl_elastic.flower.client_state import ClientState
from fl_elastic.flower.forget_request import ForgetRequest
from fl_elastic.flower.records import HAVE, NAMES, PACKED, failure
from fl_elastic.flower.tasks.task import Answer, RoundTask, task_in
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import CountExamples, ExampleCounter, as_pair
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.trainable import flags_of
from fl_elastic.losses import own_loss_or_cross_entropy
from fl_elastic.optimizers import OptimizerFn, adds_noise, made_by
from fl_elastic.planning import POLICIES, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import model_device
from fl_elastic.training import FitReport, TrainerOptions
from fl_elastic.training.evaluate import MetricsFn
from fl_elastic.training.loader import first_batches
from fl_elastic.training.options import check_parts, eager
from fl_elastic.update import CODECS, Manifest, load_weights
from fl_elastic.update.manifest import places_of

if TYPE_CHECKING:
    from fl_elastic.flower.capabilities import Capabilities


_LOG = logging.getLogger("fl_elastic")


def _failure_metrics(error: Exception, what: str, config: dict[str, Any]) -> dict[str, Any]:
    """Log why a client failed; return the failure as metrics for `PartialUpdates`, else raise it."""
    foreseen = isinstance(error, ElasticError)
    _LOG.error("cannot %s: %s", what, error if foreseen else repr(error), exc_info=not foreseen)
    if not config.get(PACKED):
        raise error
    return failure(error)


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
        Already on the torch device where it is trained; its weights are replaced by the server's. Parameters with
        ``requires_grad=False`` are its frozen base, which does not travel; the client refuses to train if the
        server's base is another one.
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
        a new optimiser. Called for every optimiser, including those that are made only to estimate costs.
    forget : iterable of batches, optional
        Examples that the global model must forget, and that ``train_loader`` no longer holds. (The method `forget`
        removes examples from the loader.) A server with ``RoundConfig(forget=True)`` makes the model forget them
        after the next round; once `forgotten` is true they can be deleted.
    epochs : int
        Local epochs per round; the server's config key ``local-epochs`` overrides it. If the fleet has a cut, there
        are more epochs, so that a round takes as long as without it.
    codec : str
        Codec of updates, see `fl_elastic.update.codecs`. The error of a lossy codec is added to the next update
        (error feedback).
    options : TrainerOptions, optional
        Options of the trainer.
    profile : CostProfile, optional
        Known costs of the model on this device; if left out, they are estimated.
    device : str
        Class of the device; the server counts coverage per class.
    state_dir : path-like, optional
        Folder for state between rounds: the cost profile, importance, the codec's error and, if the server asks for
        it, the model. A deployed client process lives for one message, so without a folder the costs are estimated
        again in every round; `elastic_client_app` keeps importance in Flower's context. No two clients may share a
        folder; `elastic_client_app` gives each node its own.
    client_id : str
        Name of this client; with the run's seed and the round it determines the seed of its random choices.
        `elastic_client_app` takes it from Flower's context. If left out, a digest of the client's data is used.
    feature_bytes : int
        Limit in bytes on the features at the fleet's cut that are kept in ``state_dir``, in fp16; features of the
        test data may take as many bytes again. 0 keeps none. Features reveal as much as the data: they stay on the
        device, and are deleted once a pass over all data no longer contains their example.
    metrics_fn : callable, optional
        ``metrics_fn(outputs, targets)`` returns a dict of numbers for a test batch; their means over the examples
        are sent to the server. A collection of torchmetrics computes them for all examples together. Accuracy is
        sent too, if outputs are class scores and targets are classes.

    Attributes
    ----------
    state : ClientState
        What is kept from round to round.
    forget_request : ForgetRequest
        What the server is asked to forget.
    report : FitReport or None
        Report of the last fit.
    forgotten : bool
        Whether the server has confirmed that its model was made to forget `forget_request`.
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
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.budget = budget
        self.policy = policy
        self.loss_fn = loss_fn
        self.optimizer_fn = optimizer_fn
        self.configure = configure
        self.epochs = epochs
        self.metrics_fn = metrics_fn
        self.codec = codec
        self.feature_bytes = feature_bytes
        self.options = options or TrainerOptions()
        self.device = device
        self.client_id = client_id
        self.report: FitReport | None = None
        self.forget_request = ForgetRequest.of(forget)
        self._model = ClientModel.of(eager(model))
        self.state = ClientState(
            None if state_dir is None else Path(state_dir), self._model.manifest, profile
        )

    @property
    def model(self) -> nn.Module:
        """The model that is trained; its head reads where the server's last task said."""
        return self._model.module

    @property
    def manifest(self) -> Manifest:
        """Manifest of the tensors that travel."""
        return self.state.manifest

    @property
    def data(self) -> RoundData:
        """The client's own model and loaders."""
        return RoundData(
            self.manifest, self.model, self.train_loader, self.test_loader, self.loss_fn
        )

    @property
    def forgotten(self) -> bool:
        """Whether the server has confirmed that its model was made to forget `forget_request`."""
        return self.forget_request.met

    def run_on(self, context: Context, state_dir: Path | None = None) -> None:
        """Set the client id from ``context`` and the state folder from ``state_dir``, unless they were given."""
        folder = self.state.directory or state_dir
        if not self.client_id:
            self.client_id = str(context.node_config.get("partition-id", context.node_id))
            folder = folder and folder / f"client-{self.client_id}"
        if folder != self.state.directory:
            self.state = self.state.moved(folder)

    def forget(self, ids: Iterable[int]) -> None:
        """Remove examples from the training data, and request that the global model forget them.

        From now on neither steps nor sums use these examples. With ``RoundConfig(forget=True)`` the server acts
        after the next round: it solves for a head in closed form without them, and dampens tensors that were
        trained by steps. Otherwise the head is free of them after the server's next solve. A client that is
        constructed anew for each message needs this call each time.

        Parameters
        ----------
        ids : iterable of int
            Indices of examples in the dataset of ``train_loader``; if that is a list of batches, positions counted
            through them. They refer to the data before any example was forgotten.

        Raises
        ------
        TrainingError
            If an id belongs to no example, no example would be left, or the loader does not tell which examples it
            reads.
        """
        request = self.forget_request.with_ids(self.train_loader, ids)
        if request is not self.forget_request and request.rest is not None:
            self.forget_request, self.train_loader = request, request.rest

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
        try:
            answer = self._answer("train", parameters, config)
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
            answer = self._answer("evaluate", parameters, config)
        except Exception as error:
            return 0.0, 0, _failure_metrics(error, "evaluate", config)
        return answer.loss, answer.num_examples, answer.metrics

    def capabilities(self, task: RoundTask | None = None) -> Capabilities:
        """Return this device's capabilities for a round with this task; unknown costs are estimated."""
        from fl_elastic.flower.tasks.describe import capabilities

        task = task or Train()
        with self._opened(task, None) as data:
            return capabilities(ClientRound(self, task, data))

    def forget_profile(self) -> None:
        """Delete the cost profile, so that costs are determined again when they are needed next."""
        self.state.forget_profile()

    def _answer(
        self, message_type: str, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> Answer:
        """Do the task of a message with the model that came with it."""
        arrived = time.perf_counter()
        task = task_in(config, message_type)
        self._use_model(task.read)
        weights, version, metrics = None, 0, dict[str, Any]()
        if task.brings_model:
            weights, version, metrics = self._received(parameters, config, task)
        with self._opened(task, weights) as data:
            if task.reveals_data and adds_noise(made_by(self.optimizer_fn, data.model)):
                raise TrainingError(
                    "the optimiser adds noise for privacy, and the server asks for numbers that are computed from "
                    "the data without noise: use read='none', cut='none' or 'fixed:GROUP', and no forgetting"
                )
            answer = task.answer(ClientRound(self, task, data, version, config, arrived))
            self.report = answer.report or self.report
            metrics |= data.finish(task, self.report)
        return replace(answer, metrics=answer.metrics | metrics)

    def _use_model(self, places: str) -> None:
        """Use the model whose head reads these places, with the owner's present ``requires_grad`` flags."""
        model = self._model.up_to_date()
        if model is not self._model:
            self._model = model
            self.state.go_by(model.manifest)
        if places == model.places:
            return
        if self.why_reading_is_fixed:
            raise TrainingError(self.why_reading_is_fixed)
        self._model = model.reading(places, self.train_loader, self.options.count_examples)
        self.state = ClientState(self.state.directory, self._model.manifest)

    def _received(
        self, parameters: list[NDArray[Any]], config: dict[str, Any], task: RoundTask
    ) -> tuple[dict[str, NDArray[Any]], int, dict[str, Any]]:
        """Return the received weights, their version, and metrics for the reply; packed or as a list of arrays."""
        if not config.get(PACKED):
            return self.state.received_list(parameters, self.model, config.get(NAMES)), 0, {}
        if len(parameters) != 1:
            raise UpdateError(f"expected one packed buffer, got {len(parameters)} arrays")
        weights, version = self.state.received(parameters[0].tobytes(), self.model)
        keeps = task.keep and self.state.keep_model(weights, version)
        return weights, version, {HAVE: version} if keeps else {}

    @contextmanager
    def _opened(
        self, task: RoundTask, weights: Mapping[str, NDArray[Any]] | None
    ) -> Iterator[RoundData]:
        """Yield model and data for a task, after loading the server's weights if there are any."""
        if weights is not None:
            load_weights(self.model, self.manifest, weights)
        yield self.data


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model and the manifest of what it sends.

    Attributes
    ----------
    given : nn.Module
        The owner's model.
    module : nn.Module
        The model in use: ``given``, or a `Readout` of it.
    places : str
        Places of the model that its head reads; empty for its end.
    manifest : Manifest
        The tensors that travel, and the digest of the frozen base.
    flags : tuple
        The ``requires_grad`` flags for which ``manifest`` holds.
    """

    given: nn.Module
    module: nn.Module
    places: str
    manifest: Manifest
    flags: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> ClientModel:
        """Return the owner's model, whose head may already read places other than the model's end."""
        places = places_of(ModelState.of(model).tensors)
        return cls(model, model, places, Manifest.of(model).with_base(model), flags_of(model))

    def up_to_date(self) -> ClientModel:
        """Return a copy with the manifest for the present flags; this object if they have not changed."""
        flags = flags_of(self.module)
        if flags == self.flags:
            return self
        found = Manifest.of(self.module)
        base = self.manifest.base
        manifest = replace(found, base=base) if self.places else found.with_base(self.module)
        return replace(self, manifest=manifest, flags=flags)

    def reading(
        self, places: str, loader: Iterable[Batch], count_examples: CountExamples | None
    ) -> ClientModel:
        """Return the model whose head reads these places; if there are none, the model as it was given.

        Parameters
        ----------
        places : str
            See `fl_elastic.readout.place`.
        loader : iterable of batches
            Shows the shape of the inputs.
        count_examples : callable, optional
            See `fl_elastic.training.TrainerOptions`.
        """
        module = self.given
        if places:
            # Imported here: only clients whose head moves need it.
            from fl_elastic.readout.first_pass import FirstPass
            from fl_elastic.readout.readout_module import Readout

            batch = first_batches(
                loader, 1, model_device(self.module), ExampleCounter(count_examples)
            )[0]
            inputs = as_pair(batch)[0]
            module = Readout(module, places, inputs, FirstPass.of(module, (inputs, inputs)).outputs)
        # The frozen base is the same as in the given model.
        manifest = replace(Manifest.of(module), base=self.manifest.base)
        return ClientModel(self.given, module, places, manifest, flags_of(module))
