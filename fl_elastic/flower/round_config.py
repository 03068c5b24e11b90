"""Configuration of a federation's rounds: deadline, head in closed form, cut, downlink and forgetting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fl_elastic.errors import BudgetError, PlanError, SettingError
from fl_elastic.flower.client_availability import inner_times
from fl_elastic.given import is_real, whole
from fl_elastic.readout.place import Reading

if TYPE_CHECKING:
    from fl_elastic.closed_form.sums_privacy import SumsPrivacy


# The server waits this multiple of the deadline, because a device's clock starts later, when it has the model.
_GRACE = 1.5


@dataclass(frozen=True)
class Deadline:
    """The time that a client has, from receiving the model to having sent its update.

    Parameters
    ----------
    seconds : float, optional
        Fixed time.
    quantile : float, optional
        Quantile of the times that the fleet's devices need to train everything: 0 is the fastest device, 1 the
        slowest. A device's time is its claim, but at least the time that the server measured. The shortest and the
        longest fifth of the times (at least one each, if there are three or more) do not count, so that a few false
        claims cannot set the deadline.

    Raises
    ------
    BudgetError
        Unless exactly one of them is given, with a possible value.

    Examples
    --------
    >>> times = [10.0, 20.0, 30.0, 40.0]
    >>> Deadline(quantile=0.5).among(times), Deadline(quantile=0.0).among(times)
    (25.0, 20.0)
    >>> Deadline(seconds=60).among([])
    60
    """

    seconds: float | None = None
    quantile: float | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.quantile is None):
            raise BudgetError("a deadline takes either seconds or a quantile")
        seconds, quantile = self.seconds, self.quantile
        if seconds is not None and not (is_real(seconds) and 0 < seconds < float("inf")):
            raise BudgetError(f"deadline of {seconds!r} seconds is not a positive number")
        if quantile is not None and not (is_real(quantile) and 0 <= quantile <= 1):
            raise BudgetError(f"deadline quantile {quantile!r} is not between 0 and 1")

    def among(self, times: Iterable[float]) -> float | None:
        """Return the deadline in seconds, given devices' times; None if it depends on them and none is known."""
        if self.seconds is not None:
            return self.seconds
        inner = inner_times(times)
        return float(np.quantile(inner, self.quantile or 0.0)) if inner else None


def reply_timeout(deadline: float | None) -> float | None:
    """Return the seconds for which a server waits for the replies of a round; None to wait for all.

    >>> reply_timeout(60.0), reply_timeout(None)
    (90.0, None)
    """
    return None if deadline is None else deadline * _GRACE


GIVEN_PLACES = (
    "give server and clients a fl_elastic.readout.Readout as their model, and leave read at 'last'"
)
"""Advice in error messages: how the head can read elsewhere than at the last layer without sending features."""

_NONE, _LAST = "none", "last"
_FIXED = "fixed:"
_PLANS = ("local", "server", "none")
# Round after which a head is solved for only to test it. Features change most in the first rounds, but solving
# after each of them would cost more than it gains.
_LOOK_AFTER = 2


@dataclass(frozen=True)
class RoundConfig:
    """Configuration of a federation's rounds.

    Parameters
    ----------
    deadline : Deadline, optional
        Time limit within which each client plans its round; by default clients keep only to their own budgets.
    read : str
        Where a head in closed form reads (`fl_elastic.closed_form.head.closed_form_head`): before the first round
        clients send sums, from which the server solves for the head without a training step. ``"none"`` for no such
        head; ``"last"`` for the input of the model's last linear layer; ``"auto"`` for the places of the model, or
        of its input, with the least held-out error on a few clients' examples (`fl_elastic.readout.best_places`);
        ``"auto>640"`` for at most 640 features per example; or names of places such as
        ``"features.3@grid8+features.6@grid4"``, or ``"features.6@grid8>256"`` for its features projected onto 256
        directions. The model then ends at the chosen places, as a `fl_elastic.readout.Readout`. With the prefix
        ``mirrored:``, as in ``"mirrored:auto"``, features are means over each image and its mirror image.
    plan : {"local", "server", "none"}
        Who chooses the groups to train. ``"local"``: each client. ``"server"``: the server, the same groups for
        all, such that the slowest client of the round can afford them (robust rules can then compare all clients).
        ``"none"``: rounds do not train, and the model with the head in closed form is the result.
    solve_every : int
        After this many rounds, and after the last one, the server solves for the head again, from sums of the
        present features. In between no client trains the head, so that it does not drift apart among clients with
        few classes each. The server also solves after the second round, but only for the model that is tested and
        returned: training continues under the old head, to which the features adapt. If training has made the
        solved head worse, the model of the previous solve is restored, and clients use a quarter of their
        learning rates from then on. With 0 the head is solved for once and then trained like everything else.
    sums_privacy : SumsPrivacy, optional
        Differential privacy of the sums for a head, which is then solved for once (``solve_every=0``): clients clip
        their features and add noise before they send, or the server adds it to the total of secure aggregation.
    cut : str
        The fleet's cut. ``"none"``; ``"fixed:GROUP"``, with the deepest group (or module) that is trained; or
        ``"moving"``: clients vote on it by the gain that they expect (`fl_elastic.training.cut_worth`). Tensors
        below the cut stay bit-identical everywhere, so that clients compute the features there once and keep them,
        and only tensors above the cut travel in either direction.
    delta_downlink : bool
        Whether clients keep the model and are sent only the tensors that changed since. Always true with a cut.
    forget : bool or float
        Whether clients may have examples forgotten (``ElasticClient.forget``). The server then dampens, that is
        makes smaller, the weights that matter to these examples (by the loss `fl_elastic.losses.squared_outputs`).
        A number is the factor by which a weight must matter more to them than to all examples; True derives it from
        the share of these examples. A head in closed form is not dampened but solved for again at once, from sums
        without the examples. False, the default, ignores such requests, because they can be used to harm the model.

    Raises
    ------
    SettingError
        If a value is invalid, or values contradict each other.

    Notes
    -----
    With a head in closed form, or a cut, norms keep their statistics (`TrainerOptions.keep_statistics`), because
    head and features were computed with them.

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
        if self.deadline is not None and not isinstance(self.deadline, Deadline):
            raise SettingError(
                f"deadline {self.deadline!r} is no Deadline: give Deadline(seconds=...)"
            )
        if (solves := whole(self.solve_every)) is None or solves < 0:
            raise SettingError(
                f"solve_every {self.solve_every!r} must be a whole number, and not be negative"
            )
        if self.read not in (_NONE, _LAST):
            try:
                Reading.parse(self.read)
            except PlanError as error:
                raise SettingError(f"read: {error}; none, last and auto are known too") from None
        if self.plan not in _PLANS:
            raise SettingError(f"plan {self.plan!r}: known are {', '.join(_PLANS)}")
        if self.plan == "none" and not self.solves_head:
            raise SettingError(
                "with plan='none' nothing but a head in closed form is learned: set read='auto' as well"
            )
        if self.cut not in ("none", "moving") and not self.cut_group:
            raise SettingError(f"cut {self.cut!r}: known are none, fixed:GROUP, moving")
        known = isinstance(self.forget, bool) or is_real(self.forget)
        if not known or not 0 <= self.forget < float("inf"):
            raise SettingError(
                f"forget {self.forget!r} must be True, False, or a number above 0 such as 3"
            )
        if self.sums_privacy is not None and (not self.solves_head or self.solve_every):
            raise SettingError(
                "sums_privacy is for one solve of the head, and each later solve would spend its epsilon again: "
                "use it with read='last' and solve_every=0"
            )
        if self.sums_privacy is not None and self.reads_inside:
            raise SettingError(
                f"read {self.read!r} is chosen from features without noise: {GIVEN_PLACES}"
            )

    @property
    def solves_head(self) -> bool:
        """Whether there is a head in closed form."""
        return self.read != _NONE

    @property
    def reads_inside(self) -> bool:
        """Whether that head may read elsewhere than at the input of the model's last layer."""
        return self.read not in (_NONE, _LAST)

    @property
    def cut_group(self) -> str:
        """The deepest group that is trained, if it is fixed; empty if not."""
        return self.cut.removeprefix(_FIXED) if self.cut.startswith(_FIXED) else ""

    @property
    def has_cut(self) -> bool:
        """Whether there is a cut, fixed or chosen by the server."""
        return self.cut != "none"

    @property
    def uncovered(self) -> str:
        """The first setting that differential privacy does not cover, and its replacement; empty if none."""
        uncovered = (
            (
                self.solves_head and self.sums_privacy is None,
                "a head in closed form takes exact sums",
                "read='none', or sums_privacy",
            ),
            (self.forget, "forgetting takes squares of gradients", "forget=False"),
            (
                self.cut == "moving",
                "a moving cut is chosen by the gradients of clients",
                "cut='none' or cut='fixed:GROUP'",
            ),
        )
        refusals = (
            f"{what}, which differential privacy does not cover: use {instead}"
            for is_set, what, instead in uncovered
            if is_set
        )
        return next(refusals, "")

    @property
    def keeps_statistics(self) -> bool:
        """Whether norms keep their statistics."""
        return self.solves_head or self.has_cut

    def solves_after(self, server_round: int) -> bool:
        """Return whether the server solves after this round for a head under which training then continues.

        The additional solve after the last round of a run is not included.

        >>> config = RoundConfig(read="last", solve_every=5)
        >>> config.solves_after(4), config.solves_after(5), config.solves_after(10)
        (False, True, True)
        """
        return self.solve_every > 0 and server_round % self.solve_every == 0

    def looks_after(self, server_round: int) -> bool:
        """Return whether the server solves for a head after this round, be it only to test the model."""
        return self.solves_after(server_round) or (
            self.solve_every > 0 and server_round == _LOOK_AFTER
        )

    @property
    def sends_changes(self) -> bool:
        """Whether clients keep the model, so that only what changed is sent."""
        return self.delta_downlink or self.has_cut

    @property
    def needs_capabilities(self) -> bool:
        """Whether the server has to ask devices for their capabilities."""
        by_speed = self.deadline is not None and self.deadline.quantile is not None
        return by_speed or self.plan == "server" or self.cut == "moving"
