"""A task that a server gives a client in one message, and the client's answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.flower.records import TrainReply, answer_in
from fl_elastic.update.checks import MAX_VERSION

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.training import FitReport


TASK = "fl_elastic.task"
"""Config key of the task's name; a message without it asks for training or evaluation, by its type."""

_FLOWERS_RATE = "lr"
EPOCHS = "local-epochs"
"""Config key of the number of local epochs, which the server's user may set."""
# A client's process lives for one message: it imports only the task that it is asked for.
_CLASSES = {
    "train": "train.Train",
    "evaluate": "evaluate.Evaluate",
    "describe": "describe.Describe",
    "solve-head": "solve_head.SolveHead",
    "rank-places": "rank_places.RankPlaces",
    "squared-gradients": "forgetting.SumSquaredGradients",
    "loss": "forgetting.MeasureLoss",
    "cut-worth": "cut_worth.RateCuts",
}
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, eq=False)
class Answer:
    """A client's answer to a task.

    Attributes
    ----------
    arrays : list of array
        The payload: one array of bytes, or plain arrays for secure aggregation or one of Flower's own strategies.
    num_examples : int
        Number of examples that the payload represents.
    metrics : dict
        Further numbers and texts for the server.
    loss : float
        Loss of an evaluation.
    report : FitReport, optional
        Report of a fit, for the client itself.
    """

    arrays: list[NDArray[Any]]
    num_examples: int
    metrics: dict[str, Any] = field(default_factory=dict)
    loss: float = 0.0
    report: FitReport | None = None

    @classmethod
    def packed(
        cls,
        payload: bytes,
        num_examples: int,
        metrics: dict[str, Any] | None = None,
        report: FitReport | None = None,
    ) -> Answer:
        """Return an answer with these bytes as payload."""
        arrays = [np.frombuffer(payload, dtype=np.uint8)]
        return cls(arrays, num_examples, metrics or {}, report=report)


@dataclass(frozen=True)
class RoundTask(ABC):
    """A task that the server gives one client, and the client's handler for it.

    Its fields travel as entries of the message's config. Tasks are hashable, so that messages with equal tasks
    share their content.

    Attributes
    ----------
    deadline : float, optional
        Seconds for the work and for sending its result.
    read : str
        Places of the model that its head reads (`fl_elastic.readout.place`); empty for the unchanged model.
    cut : str
        The deepest group that is trained; empty for no cut.
    kept_head : str
        Layer that the server solves for and nobody trains; empty for none.
    keep : bool
        Whether the client keeps the model, so that next time only changes are sent.
    """

    deadline: float | None = None
    read: str = ""
    cut: str = ""
    kept_head: str = ""
    keep: bool = False

    name: ClassVar[str]
    """Value of `TASK` in a message's config."""
    message_type: ClassVar[str] = "train"
    """Type of Flower's message: every kind of Flower client is reached by ``train`` and ``evaluate``."""
    brings_model: ClassVar[bool] = True
    """Whether the model comes with the message."""
    known_to_flower: ClassVar[bool] = False
    """Whether Flower's own clients can do the task, too."""
    reveals_data: ClassVar[bool] = True
    """Whether the answer contains numbers from the data that an optimiser's noise does not cover."""

    @abstractmethod
    def answer(self, work: ClientRound) -> Answer:
        """Do the task on a client whose model is the server's.

        Parameters
        ----------
        work : ClientRound
            This task on the client that does it.

        Raises
        ------
        ElasticError
            If the client cannot do it; the error is reported to the server.
        """

    def to_config(self) -> dict[str, Any]:
        """Return the config entries of the task: its name, and the fields that differ from their defaults."""
        said = {
            config_key(each.name): getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        # The learning rate is not written, because it is in the config of the server's user already.
        said.pop(_FLOWERS_RATE, None)
        return said if self.name == self.message_type else {TASK: self.name, **said}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the fields from a message's config.

        Raises
        ------
        UpdateError
            If a field is invalid.
        """
        return cls(**{each.name: _value(config, each.name, each.default) for each in fields(cls)})


def task_in(config: Mapping[str, Any], message_type: str = "train") -> RoundTask:
    """Return the task that a message asks for.

    Parameters
    ----------
    config : mapping
        Config of the message.
    message_type : {"train", "evaluate"}
        Type of the message.

    Raises
    ------
    UpdateError
        If the task is unknown, does not belong in such a message, or a field cannot be read.
    """
    name = str(config.get(TASK, message_type))
    if name not in _CLASSES:
        raise UpdateError(
            f"the server asks for task {name[:40]!r}, which this version does not know: update fl_elastic here"
        )
    module, kind = _CLASSES[name].split(".")
    task: type[RoundTask] = getattr(import_module(f"fl_elastic.flower.tasks.{module}"), kind)
    if task.message_type != message_type:
        raise UpdateError(f"task {name!r} does not come in a message of type {message_type!r}")
    return task.from_config(config)


def read_answers(
    replies: Iterable[Message],
    decode: Callable[[TrainReply], _Decoded],
    left_out: Callable[[int, str], None],
    holds: Callable[[int, int | None], None] = lambda *_: None,
) -> Iterator[tuple[int, TrainReply, _Decoded]]:
    """Yield node, reply and decoded content for each client that did the task.

    Parameters
    ----------
    replies : iterable of Message
        Replies to one task.
    decode : callable
        ``decode(reply)`` returns the content of a reply, and raises UpdateError if it cannot be read.
    left_out : callable
        ``left_out(node, reason)`` is called for each failure.
    holds : callable
        ``holds(node, version)`` is called with the version of the model that a client keeps, if any.
    """
    for message in replies:
        node = message.metadata.src_node_id
        try:
            reply = answer_in(message)
            found = decode(reply)
        except UpdateError as error:
            left_out(node, str(error))
            continue
        holds(node, reply.have)
        yield node, reply, found


def of_most(
    found: Sequence[_Decoded],
    kind: Callable[[_Decoded], Hashable],
    left_out: Callable[[_Decoded], object],
) -> list[_Decoded]:
    """Return the answers of the kind that most clients sent; ``left_out`` is called with each of the others.

    >>> of_most(["sums of a", "sums of b", "sums of a"], lambda each: each[-1], print)
    sums of b
    ['sums of a', 'sums of a']
    """
    counts = Counter(map(kind, found))
    most = max(counts, key=counts.__getitem__, default=None)
    kept = []
    for each in found:
        if kind(each) == most:
            kept.append(each)
        else:
            left_out(each)
    return kept


def config_key(name: str) -> str:
    """Return the config key of a task's field.

    >>> config_key("kept_head"), config_key("lr")
    ('fl_elastic.kept-head', 'lr')
    """
    return name if name == _FLOWERS_RATE else f"fl_elastic.{name.replace('_', '-')}"


DEADLINE = config_key("deadline")
"""Config key of a task's deadline in seconds."""


def number_in(config: Mapping[str, Any], key: str, default: float | None) -> Any:
    """Return a non-negative number from a message's config; raise UpdateError for any other value.

    >>> number_in({"proximal-mu": 0.1}, "proximal-mu", 0.0)
    0.1
    """
    value = config.get(key, default)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value <= MAX_VERSION):
        raise UpdateError(f"config {key} = {str(value)[:40]!r} is not a number from 0")
    return value


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field's value from the config: of the default's type, or a non-negative number."""
    key = config_key(name)
    if isinstance(default, (bool, str)):
        return type(default)(config.get(key, default))
    value = number_in(config, key, default)
    return int(value) if type(default) is int else value
