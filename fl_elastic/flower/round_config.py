"""Configuration of a federation's rounds: deadline, head in closed form, cut, what is sent and forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fl_elastic.errors import PlanError, RegistryError
from fl_elastic.readout.place import Reading, allowed_features

if TYPE_CHECKING:
    from fl_elastic.flower.deadline import Deadline
    from fl_elastic.update.sums_privacy import SumsPrivacy

__all__ = ["GIVEN_PLACES", "RoundConfig"]

GIVEN_PLACES = (
    "give server and clients a fl_elastic.readout.Readout as their model, and leave read at 'last'"
)
"""How a head reads elsewhere than the last layer where no client may show features of examples."""

_NONE, _LAST = "none", "last"
_FIXED = "fixed:"
_PLANS = ("local", "server", "none")
# Features move most in the first rounds; a pass over the data for each would take longer than it is worth.
_LOOK_AFTER = 2


@dataclass(frozen=True)
class RoundConfig:
    """How the rounds of a federation go.

    Parameters
    ----------
    deadline : Deadline, optional
        Each client plans its round to fit; left out, clients keep to their own budgets alone.
    read : str
        Where a head in closed form reads (`fl_elastic.update.closed_form.closed_form_head`). Before the first
        round clients send sums, from which the server solves for the head without a step. ``"none"`` for no such
        head; ``"last"`` for what enters the model's last linear layer; ``"auto"`` for the places of the model, or
        of its input, at which a few clients' examples are told best by a head that has not seen them
        (`fl_elastic.readout.choice`), ``"auto>640"`` for at most so many numbers of an example; or names of places
        such as ``"features.3@grid8+features.6@grid4"``, or ``"features.6@grid8>256"`` for its features projected
        onto 256 directions. From then on the model ends there, as a `fl_elastic.readout.readout.Readout`.
    plan : {"local", "server", "none"}
        Who chooses what is trained: each client for itself; the server, the same for all, as the slowest client of
        the round can afford it (robust rules then have all clients to compare); or nobody: rounds do not train, and
        the head in closed form is the result.
    solve_every : int
        The server solves for the head again after so many rounds, and after the last, from sums of the features as
        they are then; in between nobody trains it, so that it does not drift apart where clients have few classes
        each. After the second round it solves as well, for a model to test and hand out: training goes on under the
        head that it has, for features come to suit that. Where training has made the features worth less, the
        model of the time before is put back, and clients take a quarter of their learning rates from then on. 0 has
        the head trained like everything else after the first time.
    sums_privacy : SumsPrivacy, optional
        Differential privacy of the sums for a head, which is then solved for once (``solve_every=0``): clients clip
        their features and add noise before they send, or the server does to the total of secure aggregation.
    cut : str
        The fleet's cut: ``"none"``, ``"fixed:GROUP"``, the deepest group (or module) that anybody trains, or
        ``"moving"``: the server puts it where clients say that training gains most
        (`fl_elastic.training.cut_worth`), and later moves it deeper, never up. What lies below it stays
        bit-identical everywhere, so that clients compute its features once and keep them, and only what lies above
        it travels, to clients as well.
    delta_downlink : bool
        Clients keep the model they got, and are sent the tensors that changed since. With a cut they always do.
    forget : bool or float
        Whether a client may have examples forgotten (``ElasticClient.forget``), by the server making weights
        smaller (`fl_elastic.losses.squared_outputs` tells which). A number is how many times as much a weight must
        matter to them as to everything; True leaves that to the share of examples that are to be forgotten. False
        does not listen to such requests, for who may say what is to be forgotten can do harm to the model. A head
        in closed form is solved for anew instead, at once, from sums without the examples.

    Raises
    ------
    RegistryError
        If a value is none of these.

    Notes
    -----
    With a head in closed form, or a cut, norms keep their statistics (`TrainerOptions.keep_statistics`): head and
    features were found with them.

    Examples
    --------
    >>> config = RoundConfig(read="auto", cut="moving")
    >>> config.solves_head, config.sends_changes, RoundConfig().solves_head
    (True, True, False)
    """

    deadline: Deadline | None = None
    read: str = _NONE
    plan: Literal["local", "server", "none"] = "local"
    solve_every: int = 5
    sums_privacy: SumsPrivacy | None = None
    cut: str = "none"
    delta_downlink: bool = False
    forget: bool | float = False

    def __post_init__(self) -> None:
        if self.solve_every < 0:
            raise RegistryError(f"solve_every {self.solve_every} must not be negative")
        if self.read not in (_NONE, _LAST):
            try:
                if allowed_features(self.read) is None:
                    Reading.parse(self.read)
            except PlanError as error:
                raise RegistryError(
                    f"read: {error}; known are none, last and auto besides"
                ) from None
        if self.plan not in _PLANS:
            raise RegistryError(f"plan {self.plan!r}: known are {', '.join(_PLANS)}")
        if self.plan == "none" and not self.solves_head:
            raise RegistryError(
                "with plan='none' there is a head in closed form alone: set read='auto' as well"
            )
        if self.cut not in ("none", "moving") and not self.cut_group:
            raise RegistryError(f"cut {self.cut!r}: known are none, fixed:GROUP, moving")
        if not 0 <= self.forget < float("inf"):
            raise RegistryError(
                f"forget {self.forget} must be True, False, or a number above 0 such as 3"
            )
        if self.sums_privacy is not None and (not self.solves_head or self.solve_every):
            raise RegistryError(
                "sums_privacy is of one head, and each later solve would spend its epsilon again: use it with "
                "read='last' and solve_every=0"
            )
        if self.sums_privacy is not None and self.reads_inside:
            raise RegistryError(
                f"read {self.read!r} is chosen from features without noise: {GIVEN_PLACES}"
            )

    @property
    def solves_head(self) -> bool:
        """Whether there is a head in closed form."""
        return self.read != _NONE

    @property
    def reads_inside(self) -> bool:
        """Whether that head may read elsewhere than what enters the model's last layer."""
        return self.read not in (_NONE, _LAST)

    @property
    def cut_group(self) -> str:
        """The deepest group that anybody trains, where that is fixed; empty where it is not."""
        return self.cut.removeprefix(_FIXED) if self.cut.startswith(_FIXED) else ""

    @property
    def has_cut(self) -> bool:
        """Whether there is a cut, fixed or moving."""
        return self.cut != "none"

    @property
    def uncovered(self) -> str:
        """What differential privacy does not cover of these terms, and what to use instead; empty for nothing."""
        told = (
            (
                self.solves_head and self.sums_privacy is None,
                "a head in closed form takes exact sums",
                "read='none', or sums_privacy",
            ),
            (self.forget, "forgetting takes squares of gradients", "forget=False"),
            (
                self.cut == "moving",
                "a moving cut goes by what clients say of their gradients",
                "cut='none' or cut='fixed:GROUP'",
            ),
        )
        found = (
            f"{what}, which differential privacy does not cover: use {instead}"
            for asked, what, instead in told
            if asked
        )
        return next(found, "")

    @property
    def keeps_statistics(self) -> bool:
        """Whether norms keep their statistics."""
        return self.solves_head or self.has_cut

    def solves_after(self, server_round: int) -> bool:
        """Whether the head that rounds are trained under is solved for after this round, the last one aside.

        >>> config = RoundConfig(read="last", solve_every=5)
        >>> config.solves_after(4), config.solves_after(5), config.solves_after(10)
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
    def needs_capabilities(self) -> bool:
        """Whether the server has to ask what the devices can do."""
        by_speed = self.deadline is not None and self.deadline.quantile is not None
        return by_speed or self.plan == "server" or self.cut == "moving"
