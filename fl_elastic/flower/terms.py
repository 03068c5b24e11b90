"""What a server asks of its clients in the rounds besides training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fl_elastic.errors import PlanError, RegistryError
from fl_elastic.readout.place import parse_places
from fl_elastic.update import CODECS

if TYPE_CHECKING:
    from fl_elastic.flower.deadline import Deadline
    from fl_elastic.update.sums_privacy import SumsPrivacy

__all__ = ["GIVEN_PLACES", "RoundTerms"]

GIVEN_PLACES = (
    "give server and clients a fl_elastic.readout.Readout as their model, and leave read out"
)
"""How a head reads elsewhere than the last layer where no client may show features of examples."""

_FIXED = "fixed:"
# Those of `fl_elastic.training.feature_codec`, which a server does not load.
_PRECISIONS = ("fp32", "fp16", "int8")
_KNOWN = {
    "plan_source": ("local", "shared_rng", "server"),
    "late": ("drop", "merge"),
    "round_zero": ("none", "closed_form"),
}
# Features move most in the first rounds; a pass over the data for each would take longer than it is worth.
_LOOK_AFTER = 2


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
        What becomes of an update that arrives in a later round: dropped, or merged with less weight, where the
        client has sent none of that round.
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
    read : str
        Where the head in closed form reads: ``"last"``, what enters the model's last linear layer; ``"auto"``, the
        places of the model, or of its input, at which a few clients' examples are told best by a head that has not
        seen them (`fl_elastic.readout.choice`); or names of places such as ``"features.3@grid8+features.6@grid4"``.
        The model then ends there: it is a `fl_elastic.readout.readout.Readout` from round zero on.
    steps : bool
        Whether rounds train at all: without, the head in closed form of round zero is the result.
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
    sums_privacy : SumsPrivacy, optional
        Differential privacy of the sums for a head, which is then solved for once (``solve_every=0``): clients clip
        their features and add noise before they send, or the server does to the total of secure aggregation.
    codecs : sequence of str
        Codecs in which clients send, one after the other, in place of their own: the next one from the round on in
        which the fleet's loss has levelled off (`fl_elastic.flower.precision`), the last one in the last fifth of
        the run. Empty leaves it to the clients.
    feature_precisions : sequence of str
        Precisions in which clients keep features at the cut ("int8", "fp16", "fp32"), one after the other, in place
        of their own, by the same rounds as ``codecs``: of fewer bits more examples' features fit. With each new one
        a client computes its features once more; a stream with latent replay stores those of later samples so, and
        leaves the others as they are.
    forget : bool or float
        Whether a client may have examples forgotten (``ElasticClient(forget=...)``), by the server making weights
        smaller (`fl_elastic.losses.squared_outputs` tells which). A number is how many times as much a weight must
        matter to them as to everything; True leaves that to the share of examples that are to be forgotten. False
        does not listen to such wishes, for who may say what is to be forgotten can do harm to the model. A head in
        closed form is solved for anew instead, at once, from sums without the examples.

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
    read: str = "last"
    steps: bool = True
    solve_every: int = 5
    sums_privacy: SumsPrivacy | None = None
    cut: str = "none"
    codecs: Sequence[str] = ()
    feature_precisions: Sequence[str] = ()
    forget: bool | float = False

    def __post_init__(self) -> None:
        for name in ("quota", "solve_every"):
            if getattr(self, name) < 0:
                raise RegistryError(f"{name} {getattr(self, name)} must not be negative")
        if not 0 <= self.blend < 1:
            raise RegistryError(f"blend {self.blend} must be in [0, 1)")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise RegistryError(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")
        if self.read not in ("last", "auto"):
            try:
                parse_places(self.read)
            except PlanError as error:
                raise RegistryError(f"read: {error}; known are last and auto besides") from None
        if self.read != "last" and self.round_zero == "none":
            raise RegistryError(
                f"read {self.read!r} is where a head in closed form reads: set round_zero='closed_form' as well"
            )
        if not self.steps and self.round_zero == "none":
            raise RegistryError(
                "without steps there is a head in closed form alone: set round_zero='closed_form'"
            )
        if self.cut not in ("none", "moving") and not self.cut_group:
            raise RegistryError(f"cut {self.cut!r}: known are none, fixed:GROUP, moving")
        for name, example in (("codecs", "fp32"), ("feature_precisions", "fp16")):
            if isinstance(given := getattr(self, name), str):
                raise RegistryError(
                    f"{name} {given!r} must be a list, such as ['int8', '{example}']"
                )
        for codec in self.codecs:
            CODECS.check(codec)
        for precision in self.feature_precisions:
            if precision not in _PRECISIONS:
                raise RegistryError(
                    f"feature_precisions: {precision!r} is unknown, use {', '.join(_PRECISIONS)}"
                )
        if self.feature_precisions and not self.has_cut:
            raise RegistryError("feature_precisions are of features at a cut: set cut as well")
        if not 0 <= self.forget < float("inf"):
            raise RegistryError(
                f"forget {self.forget} must be True, False, or a number above 0 such as 3"
            )
        if self.sums_privacy is not None and (self.round_zero == "none" or self.solve_every):
            raise RegistryError(
                "sums_privacy is of one round zero, and each later solve would spend its epsilon again: use it "
                "with round_zero='closed_form' and solve_every=0"
            )
        if self.sums_privacy is not None and self.read != "last":
            raise RegistryError(
                f"read {self.read!r} is chosen from features without noise: {GIVEN_PLACES}"
            )
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
    def uncovered(self) -> str:
        """What differential privacy does not cover of these terms, and what to use instead; empty for nothing."""
        told = (
            (
                self.round_zero != "none" and self.sums_privacy is None,
                "round zero sends exact sums",
                "round_zero='none', or sums_privacy",
            ),
            (self.forget, "forgetting takes squares of gradients", "forget=False"),
            (self.codecs, "codecs go by the losses of clients", "codecs=()"),
            (
                self.feature_precisions,
                "feature_precisions go by the losses of clients",
                "feature_precisions=()",
            ),
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
