"""What a server asks of its clients in a round besides training, and the words in which it asks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_elastic.errors import PlanError, RegistryError, UpdateError
from fl_elastic.flower.deadline import Deadline
from fl_elastic.flower.group_names import GroupNames
from fl_elastic.update import CODECS
from fl_elastic.update.partial import MAX_VERSION

__all__ = [
    "BLEND",
    "CHANGE",
    "CODEC",
    "CUT",
    "CUT_WORTH",
    "DEADLINE",
    "FORGOTTEN",
    "GROUPS",
    "IMPORTANCE",
    "KEEP",
    "KEEP_STATISTICS",
    "KEPT_HEAD",
    "OVERDUE",
    "RATE",
    "ROUND_ZERO",
    "SEED",
    "SQUARES",
    "Instructions",
    "RoundTerms",
    "read_groups",
    "read_importance",
]

DEADLINE = "fl_elastic.deadline"
OVERDUE = "fl_elastic.overdue"
IMPORTANCE = "fl_elastic.importance"
BLEND = "fl_elastic.blend"
CHANGE = "fl_elastic.change"
ROUND_ZERO = "fl_elastic.round-zero"
SEED = "fl_elastic.seed"
KEEP = "fl_elastic.keep"
CUT = "fl_elastic.cut"
CUT_WORTH = "fl_elastic.cut-worth"
SQUARES = "fl_elastic.squares"
CODEC = "fl_elastic.codec"
FORGOTTEN = "fl_elastic.forgotten"
KEPT_HEAD = "fl_elastic.kept-head"
KEEP_STATISTICS = "fl_elastic.keep-statistics"
GROUPS = "fl_elastic.groups"
RATE = "fl_elastic.rate"

_FIXED = "fixed:"
# Features move most in the first rounds; a pass over the data for each would take longer than it is worth.
_LOOK_AFTER = 2
_MOST_GROUPS = 10_000
_LONGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class RoundTerms:
    """Rules of the rounds that partial updates make possible.

    Parameters
    ----------
    deadline : Deadline, optional
        Each client plans its round to fit; left out, clients keep to their own budgets alone.
    quota : int
        A client that has left out a tensor in so many of its rounds trains it in the next one, in fewer steps if
        need be, whatever its own state says; 0 leaves coverage to the clients.
    blend : float
        Weight of the fleet's mean importance against the client's own, in [0, 1).
    plan_source : {"local", "shared_rng", "server"}
        Whether each client chooses by its own lights, random choices follow one seed per round for all (clients
        go through the groups in the same order, so that equal budgets choose the same and the others overlap),
        or the server chooses for all what the slowest client of the round can afford.
    late : {"drop", "merge"}
        What becomes of an update that arrives in a later round: dropped, or merged with less weight.
    share_change : bool
        Tell clients how much the last round changed each tensor (FedEL's global importance).
    delta_downlink : bool
        Clients keep the model they got, and are sent the tensors that changed since.
    grace : float
        The server waits so many times the deadline, at least 1: the device's clock starts later, when it has the
        model.
    step_back : bool
        Where the losses that clients report jump, go back to the model before, and take no steps longer than theirs
        from then on (`LossGuard`).
    round_zero : {"none", "closed_form"}
        What is done before the first round: nothing, or clients send sums from which the server solves for the
        model's last linear layer (`fl_elastic.update.closed_form.closed_form_head`), without a step.
    solve_every : int
        After so many rounds, and after the last, the server solves for the head again, from sums of the features as
        they are then; in between nobody trains it, so that it does not drift apart where clients have few classes
        each. After the second round it solves as well, for a model to test and hand out: training goes on under the
        head that it has, for features come to suit that. Where training has made the features worth less, the
        model of the time before is put back, and clients take a quarter of their learning rates from then on. 0 has
        the head trained like everything else after round zero.
    cut : str
        The fleet's cut: ``"none"``, ``"fixed:GROUP"``, the deepest group (or module) that anybody trains, or
        ``"moving"``: the server puts it where clients say that training gains most
        (`fl_elastic.training.cut_worth`), and later moves it deeper, never up. What lies below it stays
        bit-identical everywhere, so that clients compute its features once and keep them, and only what lies above
        it travels, to clients as well.
    codecs : sequence of str
        Codecs in which clients send, one after the other, in place of their own: the next one from the round on in
        which the fleet's loss has levelled off (`fl_elastic.flower.precision`), the last one in the last fifth of
        the run. Empty leaves it to the clients.
    forget : float
        Whether a client may have examples forgotten (``ElasticClient(forget=...)``): how many times as much a
        weight must matter to them as to everything for the server to make it smaller. 0 does not listen to such
        wishes, for who may say what is to be forgotten can do harm to the model.

    Raises
    ------
    RegistryError
        If a value is none of these.

    Notes
    -----
    With a head in closed form, or a cut, norms keep their statistics (`TrainerOptions.keep_statistics`): head and
    features were found with them.
    """

    deadline: Deadline | None = None
    quota: int = 0
    blend: float = 0.0
    plan_source: Literal["local", "shared_rng", "server"] = "local"
    late: Literal["drop", "merge"] = "drop"
    share_change: bool = False
    delta_downlink: bool = False
    grace: float = 1.5
    step_back: bool = True
    round_zero: Literal["none", "closed_form"] = "none"
    solve_every: int = 5
    cut: str = "none"
    codecs: Sequence[str] = ()
    forget: float = 0.0

    def __post_init__(self) -> None:
        if self.quota < 0:
            raise RegistryError(f"quota {self.quota} must not be negative")
        if not 0 <= self.blend < 1:
            raise RegistryError(f"blend {self.blend} must be in [0, 1)")
        if self.plan_source not in ("local", "shared_rng", "server"):
            raise RegistryError(
                f"plan_source {self.plan_source!r}: known are local, shared_rng, server"
            )
        if self.late not in ("drop", "merge"):
            raise RegistryError(f"late {self.late!r}: known are drop, merge")
        if self.round_zero not in ("none", "closed_form"):
            raise RegistryError(f"round_zero {self.round_zero!r}: known are none, closed_form")
        if self.solve_every < 0:
            raise RegistryError(f"solve_every {self.solve_every} must not be negative")
        if self.cut not in ("none", "moving") and not (
            self.cut.startswith(_FIXED) and self.cut != _FIXED
        ):
            raise RegistryError(f"cut {self.cut!r}: known are none, fixed:GROUP, moving")
        if isinstance(self.codecs, str):
            raise RegistryError(f"codecs {self.codecs!r} must be a list, such as ['int8', 'fp32']")
        for codec in self.codecs:
            CODECS.check(codec)
        if not 0 <= self.forget < float("inf"):
            raise RegistryError(f"forget {self.forget} must be 0, or a number above it such as 3")
        if not 1 <= self.grace < float("inf"):
            raise RegistryError(f"grace {self.grace} must be at least 1")

    @property
    def cut_group(self) -> str:
        """The deepest group that anybody trains, where that is fixed; empty where it is not."""
        return self.cut.removeprefix(_FIXED) if self.cut.startswith(_FIXED) else ""

    @property
    def has_cut(self) -> bool:
        """Whether there is a cut, fixed or moving."""
        return self.cut != "none"

    @property
    def keeps_statistics(self) -> bool:
        """Whether norms keep their statistics."""
        return self.round_zero != "none" or self.has_cut

    def solves_after(self, server_round: int) -> bool:
        """Whether the head that rounds are trained under is solved for after this round, the last one aside.

        >>> terms = RoundTerms(round_zero="closed_form", solve_every=5)
        >>> terms.solves_after(4), terms.solves_after(5), terms.solves_after(10)
        (False, True, True)
        """
        return self.solve_every > 0 and server_round % self.solve_every == 0

    def looks_after(self, server_round: int) -> bool:
        """Whether a head is solved for after this round, if only to test the model and see what training does."""
        return self.solves_after(server_round) or (
            self.solve_every > 0 and server_round == _LOOK_AFTER
        )

    @property
    def sends_changes(self) -> bool:
        """Whether clients keep the model, so that only what changed is sent."""
        return self.delta_downlink or self.has_cut

    @property
    def wants_importance(self) -> bool:
        """Whether the server makes anything of what clients say about importance."""
        return self.blend > 0 or self.plan_source == "server"

    @property
    def needs_capabilities(self) -> bool:
        """Whether the server has to ask what the devices can do."""
        by_speed = self.deadline is not None and self.deadline.quantile is not None
        return by_speed or self.plan_source == "server" or self.cut == "moving"


@dataclass(frozen=True)
class Instructions:
    """What one client is told in one round; hashable, so that clients told the same share one message content.

    Attributes
    ----------
    deadline : float, optional
        Seconds for training and sending.
    overdue : bool
        Whether what was left out longest must be trained now.
    importance : str
        The fleet's mean importance by group name, as JSON; empty for none.
    blend : float
        Its weight; a positive one asks the client to report its own importance.
    seed : int, optional
        Of random choices.
    change : str
        Sum of squares of the last round's change by tensor, as JSON; empty for none.
    keep : bool
        Whether to keep the model, so that only what changes need be sent next time.
    groups : str
        Names of the groups to train, as a JSON list; empty to let the client choose.
    round_zero : bool
        Whether to send sums for a head in closed form instead of training.
    cut : str
        The deepest group that anybody trains; empty for none.
    kept_head : str
        Group of the head that the server solves for and nobody trains; empty for none.
    keep_statistics : bool
        Whether norms keep their statistics.
    rate : float
        Factor of the optimiser's learning rate, in (0, 1].
    lr : float, optional
        The learning rate in place of the optimiser's own, under the key that Flower's apps use for it.
    squares : bool
        Whether to send squares of gradients instead of training, so that examples can be forgotten.
    codec : str
        How to write the update, in place of the client's own codec; empty for that.
    forgotten : str
        The client's wish to have examples forgotten that was met; empty for none.
    cut_worth : bool
        Whether to say what training down to each place would gain, instead of training; with ``round_zero``, under
        a head that the client solves for itself.
    """

    deadline: float | None = None
    overdue: bool = False
    importance: str = ""
    blend: float = 0.0
    seed: int | None = None
    change: str = ""
    keep: bool = False
    groups: str = ""
    round_zero: bool = False
    cut: str = ""
    kept_head: str = ""
    keep_statistics: bool = False
    cut_worth: bool = False
    squares: bool = False
    forgotten: str = ""
    codec: str = ""
    rate: float = 1.0
    lr: float | None = None

    @property
    def trains(self) -> bool:
        """Whether the client is asked to train or test, and not for something that only the library's know."""
        return not (self.round_zero or self.cut_worth or self.squares)

    @property
    def wants_importance(self) -> bool:
        """Whether the client is to report its importance."""
        return self.blend > 0 or bool(self.groups)

    def to_config(self) -> dict[str, Any]:
        """Return the entries of a message's config, only those that say something."""
        config: dict[str, Any] = {}
        if self.deadline is not None:
            config[DEADLINE] = self.deadline
        if self.overdue:
            config[OVERDUE] = True
        if self.importance:
            config[IMPORTANCE] = self.importance
        if self.blend > 0:
            config[BLEND] = self.blend
        if self.seed is not None:
            config[SEED] = self.seed
        if self.change:
            config[CHANGE] = self.change
        if self.keep:
            config[KEEP] = True
        if self.groups:
            config[GROUPS] = self.groups
        if self.round_zero:
            config[ROUND_ZERO] = True
        if self.cut:
            config[CUT] = self.cut
        if self.kept_head:
            config[KEPT_HEAD] = self.kept_head
        if self.keep_statistics:
            config[KEEP_STATISTICS] = True
        if self.cut_worth:
            config[CUT_WORTH] = True
        if self.squares:
            config[SQUARES] = True
        if self.codec:
            config[CODEC] = self.codec
        if self.forgotten:
            config[FORGOTTEN] = self.forgotten
        if self.rate != 1.0:
            config[RATE] = self.rate
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Instructions:
        """Read the entries of a message's config.

        Raises
        ------
        UpdateError
            If one of them is not what it should be.
        """
        rate = _number(config, RATE, 1.0) or 0.0
        if not 0 < rate <= 1:
            raise UpdateError(f"config {RATE} = {rate} is not above 0 and at most 1")
        return cls(
            deadline=_number(config, DEADLINE, None),
            overdue=bool(config.get(OVERDUE, False)),
            importance=str(config.get(IMPORTANCE, "")),
            blend=_number(config, BLEND, 0.0) or 0.0,
            seed=None if (seed := _number(config, SEED, None)) is None else int(seed),
            change=str(config.get(CHANGE, "")),
            keep=bool(config.get(KEEP, False)),
            groups=str(config.get(GROUPS, "")),
            round_zero=bool(config.get(ROUND_ZERO, False)),
            cut=str(config.get(CUT, "")),
            kept_head=str(config.get(KEPT_HEAD, "")),
            keep_statistics=bool(config.get(KEEP_STATISTICS, False)),
            cut_worth=bool(config.get(CUT_WORTH, False)),
            squares=bool(config.get(SQUARES, False)),
            forgotten=str(config.get(FORGOTTEN, "")),
            codec=str(config.get(CODEC, "")),
            rate=rate,
            lr=_number(config, "lr", None),
        )

    def importance_by_group(self) -> dict[str, float]:
        """Return the importance by group name; empty if there is none or it cannot be read."""
        return read_importance(self.importance)


def _number(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_VERSION:
        raise UpdateError(f"config {key} = {str(value)[:40]!r} is not a number from 0")
    return float(value) if isinstance(value, float) else value


def read_groups(text: str) -> tuple[str, ...]:
    """Return the names in ``groups`` of `Instructions`; raises PlanError if it is no list of names.

    >>> read_groups('["head", "conv"]')
    ('head', 'conv')
    """
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"groups {text[:40]!r} cannot be read: {error}") from None
    return tuple(names)


def read_importance(text: object, groups: GroupNames | None = None) -> dict[str, float]:
    """Return shares of importance by group name; empty for anything that is not a fair distribution.

    It comes from outside: an entry that is negative, not a number, or of a group that the model cannot have spoils
    the whole, and a text that is too long for the model is not read.

    Parameters
    ----------
    text : object
        A JSON object, if it is what it should be.
    groups : GroupNames, optional
        Which names are possible, where the model is known.

    Examples
    --------
    >>> read_importance('{"head": 3.0, "conv": 1.0}')
    {'head': 0.75, 'conv': 0.25}
    >>> read_importance('{"head": NaN}')
    {}
    """
    if not isinstance(text, str) or not text:
        return {}
    longest, most = (_LONGEST_TEXT, _MOST_GROUPS)
    if groups is not None:
        longest, most = groups.longest_text, groups.most
    if len(text) > longest:
        return {}
    try:
        found = json.loads(text)
        pairs = {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    fair = all(0 <= value < float("inf") for value in pairs.values()) and len(pairs) <= most
    total = sum(pairs.values())
    if not fair or not 0 < total < float("inf"):
        return {}
    if groups is not None and not groups.fit(pairs):
        return {}
    return {name: value / total for name, value in pairs.items()}
