"""The inner strategy: check that partial updates can be merged under it, and let it aggregate the merged model."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from numpy.typing import NDArray

from fl_elastic.aggregation import RULES, AggregationRule, MergeOptions, ServerOptimizer
from fl_elastic.errors import CheckpointError, ElasticError, SettingError, UpdateError
from fl_elastic.flower.metrics import completed_metrics, mean_metrics
from fl_elastic.flower.records import EXAMPLES
from fl_elastic.flower.round import Round, one_line
from fl_elastic.flower.tasks.task import EPOCHS
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role, Weights

# Wording of the log lines of Flower's strategies.
_RECEIVED = "%s: Received %s results and %s failures"
_SERVER_DP = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
_CLIENT_DP = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
# Not linear in the replies: a merged update has no meaning for them, and completed updates would fake agreement.
_NOT_LINEAR = (
    FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg, FedXgbBagging, FedXgbCyclic,
)  # fmt: skip
_LOG = logging.getLogger("fl_elastic")
# Settings by the names of Flower's older examples, and the names under which clients read them.
_READ_AS = {name.replace("-", "_"): name for name in (EPOCHS, "proximal-mu")}

Configure: TypeAlias = Callable[..., Iterable[Message]]
"""A method ``configure_train`` or ``configure_evaluate`` of a strategy."""


def check_inner(inner: Strategy, rule: str | AggregationRule | None) -> str | AggregationRule:
    """Return the aggregation rule to use with ``inner``.

    Raises
    ------
    SettingError
        If it is not a strategy, or partial updates cannot be merged under it by this rule or by any.
    """
    check_strategy(inner)
    for strategy in chain(inner):
        if why := getattr(strategy, "not_inside", ""):
            raise SettingError(f"PartialUpdates cannot be put around {why}")
    for strategy in chain(inner):
        if isinstance(strategy, _NOT_LINEAR):
            names = dict.fromkeys(type(each).__name__ for each in (inner, strategy))
            raise SettingError(
                f"{' around '.join(names)} is not a linear mean, so partial updates cannot be merged under it; "
                "use FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad or FedProx"
            )
        if isinstance(strategy, _CLIENT_DP):
            raise SettingError(
                f"{type(strategy).__name__} needs dense replies clipped by a client mod; "
                "use the server-side wrapper with packed updates"
            )
    keys = {str(getattr(each, "weighted_by_key", EXAMPLES)) for each in _innermost(inner)}
    if len(keys) > 1:
        raise SettingError(
            f"{type(inner).__name__} holds strategies that weight replies by different metrics, "
            f"{' and '.join(sorted(keys))}: let them have one weighted_by_key"
        )
    if sees_each_client(inner):
        if rule is not None and RULES.name_of(rule) != "all":
            raise SettingError(
                f"rule {RULES.name_of(rule)!r} lets one client's data into others' completed updates, which voids "
                "the privacy guarantee; under differential privacy use rule 'all'"
            )
        return "all"
    return rule or "contributors"


def check_strategy(inner: object) -> None:
    """Raise SettingError unless this is a strategy object of flwr.serverapp."""
    if isinstance(inner, Strategy):
        return
    if isinstance(inner, type):
        raise SettingError(f"the strategy {inner.__name__} is a class: give {inner.__name__}(...)")
    raise SettingError(
        f"{type(inner).__name__} is not a strategy of flwr.serverapp.strategy: give one of these, such as FedAvg()"
    )


def chain(inner: Strategy) -> list[Strategy]:
    """Return the strategy and those it wraps, outermost first; a wrapper may hold several."""
    chain = [inner]
    # A user's wrapper may keep them under any name; a strategy may also refer to the one around it.
    for strategy in chain:
        chain += [each for each in _held_by(strategy) if not any(each is one for one in chain)]
    return chain


def _held_by(strategy: Strategy) -> list[Strategy]:
    """Return the strategies in the attributes of a strategy, or in lists and dicts there."""
    held: list[Strategy] = []
    for value in vars(strategy).values():
        several = value.values() if isinstance(value, dict) else value
        held += [
            each
            for each in (several if isinstance(value, (dict, list, tuple)) else [value])
            if isinstance(each, Strategy) and not any(each is one for one in held)
        ]
    return held


def _innermost(inner: Strategy) -> list[Strategy]:
    """Return the strategies that wrap no other strategy; references to those around them do not count."""
    found = chain(inner)
    place = {id(strategy): index for index, strategy in enumerate(found)}
    return [
        each for each in found if all(place[id(held)] <= place[id(each)] for held in _held_by(each))
    ]


def sees_each_client(inner: Strategy) -> bool:
    """Return whether the strategy treats clients one by one, as differential privacy does by clipping.

    Any other linear strategy gets the finished mean as one reply with the summed weight.
    """
    return any(isinstance(strategy, _SERVER_DP) for strategy in chain(inner))


def refuse_what_each_seen_ignores(merge: MergeOptions, optimizer: ServerOptimizer | None) -> None:
    """Raise SettingError for settings without effect if the inner strategy merges the replies itself."""
    ignored = {
        "server_optimizer": optimizer is not None,
        "weighting='uniform'": merge.weighting != "examples",
        "normalise_steps=True": merge.normalise_steps,
        "late='merge'": merge.late != "drop",
    }
    for name, is_given in ignored.items():
        if is_given:
            raise SettingError(
                f"{name} has no effect under differential privacy, where the inner strategy merges the clipped "
                "replies: leave it out; for a server optimiser put FedAvgM, FedAdam or FedYogi inside"
            )


def say_what_it_sees(inner: Strategy) -> None:
    """Warn which methods of a user's own strategy are never called, or get one merged reply in place of all."""
    for strategy in chain(inner):
        if not _is_flowers(strategy.start):
            _LOG.warning(
                "%s.start is never called: the start of the outermost strategy runs the rounds",
                type(strategy).__name__,
            )
    if sees_each_client(inner):
        return
    for strategy in chain(inner):
        if not _is_flowers(strategy.aggregate_train):
            _LOG.warning(
                "aggregate_train of %s is given one reply, with the merged model and the summed weight, and not "
                "that of each client: the weights of replies cannot be changed there, nor single ones left out",
                type(strategy).__name__,
            )


def refuse_wrapper(own: Strategy, without_effect: Iterable[str]) -> None:
    """Raise SettingError if a strategy that cannot be put around ``own`` runs the rounds.

    Parameters
    ----------
    own : Strategy
        A `PartialUpdates` in a round.
    without_effect : iterable of str
        Its settings that take effect only in its own ``start``.

    Raises
    ------
    SettingError
        For differential privacy around it, which cannot clip packed updates; and for any wrapper around it, if
        there are settings without effect.
    """
    runner, inside = _runner_of(own), [own, *chain(own)]
    around = [
        strategy
        for strategy in chain(runner)
        if not any(strategy is one for one in inside) and not hasattr(strategy, "not_inside")
    ]
    for each in around:
        name = type(each).__name__
        if isinstance(each, _CLIENT_DP + _SERVER_DP):
            raise SettingError(
                f"{name} is put around PartialUpdates, but cannot clip the packed updates of its clients: "
                "put the server-side wrapper inside, as in "
                "PartialUpdates(DifferentialPrivacyServerSideFixedClipping(FedAvg(), ...))"
            )
        for setting in without_effect:
            raise SettingError(
                f"{name} is put around PartialUpdates, whose {setting} then has no effect, because the start of "
                f"PartialUpdates is never called: put {name} inside, as in PartialUpdates({name}(FedAvg()))"
            )


def _runner_of(own: Strategy) -> Strategy:
    """Return the strategy whose ``start`` is running; ``own`` if there is none, as in a loop of the user's own."""
    frame = inspect.currentframe()
    while frame is not None:
        runner = frame.f_locals.get("self") if frame.f_code.co_name == "start" else None
        if isinstance(runner, Strategy):
            return runner
        frame = frame.f_back
    return own


def chosen_messages(
    inner: Strategy,
    configure: Configure,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> dict[int, Message]:
    """Return by node the messages that a method of the strategy makes for a round, one for each client."""
    # By position, as Flower does: a strategy of a user may have other names for its arguments.
    messages = list(configure(server_round, arrays, config, grid))
    _refuse_other_contents(inner, messages, arrays)
    if server_round <= 1:
        _say_what_is_not_sent(messages)
    # A strategy that draws with replacement may choose a client twice; its examples must not count twice.
    first: dict[int, Message] = {}
    for message in messages:
        first.setdefault(message.metadata.dst_node_id, message)
    return first


def _refuse_other_contents(
    inner: Strategy, messages: Iterable[Message], arrays: ArrayRecord
) -> None:
    """Raise SettingError for a message with another model than ``arrays``, or more than model and settings."""
    for content in {id(message.content): message.content for message in messages}.values():
        models, settings = list(content.array_records.values()), len(content.config_records)
        if len(models) > 1 or settings > 1 or len(content) > len(models) + settings:
            raise SettingError(
                f"{type(inner).__name__} puts {', '.join(content)} into its messages, but PartialUpdates sends the "
                "model and one record of settings: put other values into the settings"
            )
        if models and models[0] is not arrays and dict(models[0]) != dict(arrays):
            raise SettingError(
                f"{type(inner).__name__} puts another model into its messages than it is given, but PartialUpdates "
                "sends the one of the last round: change it in aggregate_train"
            )


def _say_what_is_not_sent(messages: Iterable[Message]) -> None:
    """Warn of settings that are lists, which are sent only to Flower's ClientApps, and of likely misspelt names."""
    records = [each for message in messages for each in message.content.config_records.values()]
    lists = dict.fromkeys(
        name for record in records for name, value in record.items() if isinstance(value, list)
    )
    if lists:
        _LOG.warning(
            "settings that are lists are not sent to an ElasticClient, which gets single values: %s",
            one_line(", ".join(lists)),
        )
    for name in sorted({name for record in records for name in record} & _READ_AS.keys()):
        _LOG.warning(
            "an ElasticClient does not read setting %r: did you mean %r?", name, _READ_AS[name]
        )


def _is_flowers(method: Callable[..., Any]) -> bool:
    return str(getattr(method, "__module__", "")).startswith("flwr.")


def takes_the_mean_as_it_is(inner: Strategy) -> bool:
    """Return whether the strategy returns a single reply unchanged, as Flower's `FedAvg` does."""
    return getattr(inner.aggregate_train, "__func__", None) is FedAvg.aggregate_train


def goes_by_the_change(inner: Strategy) -> bool:
    """Return whether the strategy's step is the merged change times a rate, plus momentum of earlier changes."""
    return any(isinstance(strategy, FedAvgM) for strategy in chain(inner))


@contextmanager
def counted_replies(merged: int) -> Iterator[None]:
    """Make Flower's log report the number of merged replies, although its strategy gets one reply for all."""

    def counted(record: logging.LogRecord) -> bool:
        if record.msg == _RECEIVED and isinstance(record.args, tuple) and len(record.args) == 3:
            what, _, failures = record.args
            record.args = (what, merged, failures)
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(counted)
    try:
        yield
    finally:
        logger.removeFilter(counted)


def weight_key(inner: Strategy) -> str:
    """Return the metric by which the innermost strategy weights replies."""
    return str(getattr(_innermost(inner)[0], "weighted_by_key", EXAMPLES))


@contextmanager
def metrics_of_all(inner: Strategy, metrics: list[RecordDict]) -> Iterator[None]:
    """Make Flower's strategy merge the training metrics of all clients, although it gets one reply for all.

    The user's ``train_metrics_aggr_fn`` is called once, with the metrics of all clients.
    """
    own = [
        (strategy, strategy.train_metrics_aggr_fn)
        for strategy in (_innermost(inner) if metrics else ())
        if isinstance(strategy, FedAvg)
    ]
    for innermost, merge in own:
        merged = merge(metrics, innermost.weighted_by_key)
        innermost.train_metrics_aggr_fn = lambda *_, merged=merged: merged
    try:
        yield
    finally:
        for innermost, merge in own:
            innermost.train_metrics_aggr_fn = merge


def handed_on(
    inner: Strategy, this: Round, merged: Mapping[str, NDArray[Any]]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let the inner strategy aggregate: every client's reply if it must see them, else the merged model.

    Raises
    ------
    CheckpointError
        If the inner strategy fails. The replies were checked before, so the cause is its own state, perhaps
        restored from a checkpoint of another model or strategy.
    """
    metrics = completed_metrics(this.metrics, weight_key(inner))
    usable, each = this.usable, sees_each_client(inner)
    if each:
        for message, content in zip(usable, metrics, strict=True):
            message.content["metrics"] = content["metrics"]
    elif usable:
        # Sorted, so that the order of arrival does not matter.
        metrics.sort(key=str)
        usable[0].content = _for_all(inner, this, merged, metrics)
        usable = usable[:1]
    # Not every strategy of Flower can handle a round without any reply.
    if not usable and not this.failed:
        return None, None
    with counted_replies(len(this.usable)), metrics_of_all(inner, [] if each else metrics):
        try:
            return inner.aggregate_train(this.record.server_round, [*usable, *this.failed])
        except (ValueError, KeyError, AggregationError) as error:
            if isinstance(error, ElasticError) or each or not _is_flowers(inner.aggregate_train):
                raise
            raise CheckpointError(
                f"{type(inner).__name__} cannot go on from what it keeps ({error}): is the checkpoint of another "
                "model?"
            ) from error


def _for_all(
    inner: Strategy, this: Round, merged: Mapping[str, NDArray[Any]], metrics: list[RecordDict]
) -> RecordDict:
    """Return one reply with the merged model, the summed weight and the mean metrics.

    For a strategy that returns the mean unchanged, one tensor stands for all of them.
    """
    most = 1 if takes_the_mean_as_it_is(inner) else None
    arrays = parameters_of(merged, this.mean.manifest, most)
    return RecordDict({"arrays": arrays, "metrics": mean_metrics(metrics, weight_key(inner))})


def parameters_of(weights: Weights, manifest: Manifest, most: int | None = None) -> ArrayRecord:
    """Return the parameters, which are all that an inner strategy may see; only the first ``most`` if given."""
    names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
    return ArrayRecord({name: _as_vector(weights[name]) for name in names[:most]})


def completed(update: PartialUpdate, weights: Weights, manifest: Manifest) -> ArrayRecord:
    """Return all parameters of one client, with the global value of each parameter that it did not train.

    Raises
    ------
    UpdateError
        If the update changes nothing: a change of norm 0 cannot be clipped.
    """
    arrays = {
        name: np.asarray(weights[name] + update.deltas.get(name, 0.0), manifest.array_dtype(name))
        for name in manifest.names
        if manifest.role(name) is Role.PARAMETER
    }
    # Flower divides by the norm of the change.
    if all(np.array_equal(array, weights[name]) for name, array in arrays.items()):
        raise UpdateError("it changes nothing, and a change of norm 0 cannot be clipped")
    return ArrayRecord({name: _as_vector(each) for name, each in arrays.items()})


def whole_model(
    parameters: ArrayRecord, others: Weights, manifest: Manifest
) -> dict[str, NDArray[Any]]:
    """Combine the inner strategy's parameters with statistics and counters, in the manifest's dtypes.

    Raises
    ------
    UpdateError
        If a parameter has another size.
    """
    whole = {}
    for name in manifest.names:
        array = parameters[name].numpy() if name in parameters else others[name]
        if array.size != math.prod(manifest.shape(name)):
            raise UpdateError(
                f"the inner strategy gives {name!r} the shape {array.shape}, the model has {manifest.shape(name)}: "
                "what it keeps from round to round, or its checkpoint, is of another model"
            )
        whole[name] = np.asarray(array, manifest.array_dtype(name)).reshape(manifest.shape(name))
    return whole


def _as_vector(array: NDArray[Any]) -> Array:
    """Add a dimension to a zero-dimensional tensor, which Flower's clipping and optimisers would lose.

    numpy turns results of such arrays into plain scalars, on which in-place operations have no effect.
    """
    return Array(np.atleast_1d(array))
