"""Windows of channels: train everything, but in each step only a part of every inner width."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import Width
from fl_elastic.methods.windows.windows import Every, Windows
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Policy
from fl_elastic.planning.request import PlanRequest, PolicyMemory
from fl_elastic.planning.step_transform import StepCase
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import step_memory

# Keep-rates in sixteenths, from all channels down to two sixteenths; less would leave too little of a layer. Below
# one half, what narrow windows learn helps the whole model less than fewer steps in wider windows.
_NARROW = 1 / 2
_RATES = tuple(count / 16 for count in range(16, 1, -1))


@POLICIES.register("slice_out")
class SliceOutPolicy(Policy):
    """Train all groups, in each step with a window of neighbouring channels of every inner width.

    After SliceOut (Notin, Gomez, Yoo and Gal, 2020). Forward and backward pass run on smaller tensors, and the
    whole model is used afterwards. The plan takes the largest keep-rate whose step fits the budget, as predicted
    from the share of the operations. A time budget does not lower the rate below one half; fewer steps are taken
    instead.

    The method is for training from scratch: with half of its channels a pretrained network predicts next to
    nothing, and steps on this half harm the whole model.

    Parameters
    ----------
    rate : float, optional
        Share of the units of each width that a window keeps; by default chosen by the budget.
    every : {"step", "fit"}
        Whether windows are drawn for each step, as published, or for each fit. In the latter case an update
        contains only the fit's windows, and is smaller.

    Raises
    ------
    PlanError
        If a parameter is invalid.
    """

    needs_coverage = False
    basis = "windows of channels"
    name: ClassVar[str] = "slice_out"

    def __init__(
        self,
        rate: float | None = None,
        every: Every = "step",
    ) -> None:
        Windows((), 1.0 if rate is None else rate, every)
        self.rate, self.every = rate, every

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without an inner width."""
        if not _inner_widths(profile):
            raise PlanError(
                f"policy {self.name!r} leaves out channels that only a few layers use, as inside of a residual "
                "block, an MLP or an attention, and none was found in this model: its layers are residual "
                "streams, recurrent, tied, or used more than once; use policy 'elastic'"
            )

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Run the model to find the widths of which it can run on a part; done once per model.

        Raises
        ------
        PlanError
            If there is no such width.
        """
        # Imported here: only a fit runs windows.
        from fl_elastic.methods.windows.proven_widths import prove_widths, proven_widths

        inner, left_out = _inner_widths(profile), _left_out(memory.of(self.name))
        widths = [each for each in inner if each.name not in left_out]
        found = {width.name for width in proven_widths(probe.model, widths, probe.batches[0])}
        if not found:
            # This raises an error that names the cause, unless the remembered widths were of another model.
            prove_widths(probe.model, inner, probe.batches[0])
            found = {each.name for each in inner}
        whole = [each.name for each in inner if each.name not in found]
        return PolicyMemory(self.name, {"left_out": whole})

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan with the widest windows that fit; raise BudgetError if none fits memory or uplink."""
        left_out = _left_out(request.memory.of(self.name))
        widths = tuple(w for w in _inner_widths(request.profile) if w.name not in left_out)
        modes = [Mode.FULL] * len(request.profile)
        seed = int(request.generator.integers(2**31))
        if not widths:
            return request.plan(self.name, modes)
        last: tuple[PlanRequest, Windows] | None = None
        for rate in _RATES if self.rate is None else (self.rate,):
            windows = Windows(widths, rate, self.every, seed)
            narrow = self._narrow(request, windows)
            if not _fits_bytes(request, narrow, windows, modes):
                continue
            last = narrow, windows
            seconds = narrow.profile.plan_seconds(modes)
            if seconds <= request.allowed_step_seconds * (1 + 1e-9) or windows.rate <= _NARROW:
                break
        if last is None:
            raise request.refusal(
                f"policy {self.name!r} with the narrowest windows keeps or sends too much (let windows last for a "
                "fit, or use policy 'elastic'):",
                _memory(request, narrow, modes),
                _sent(request, narrow, windows, modes),
            )
        narrow, windows = last
        sending = narrow if _sends_windows(windows) else _with_groups(narrow, request)
        plan = replace(
            sending.plan(self.name, modes),
            groups=request.profile.graph.groups,
            predicted_step_bytes=_memory(request, narrow, modes),
            full_step_seconds=request.profile.full_step_seconds,
            floor_step_seconds=request.profile.floor_step_seconds,
        )
        return plan if windows.rate == 1 else plan.having(windows)

    def _narrow(self, request: PlanRequest, windows: Windows) -> PlanRequest:
        """Return the request for steps on these windows, without the memory limit, which is checked separately."""
        profile = windows.case(StepCase(request.profile)).profile
        return replace(
            request.allowing(request.allowed_step_seconds),
            profile=profile,
            budget=replace(request.budget, memory=None),
        )


@POLICIES.register("slice_out_fit")
class SliceOutFitPolicy(SliceOutPolicy):
    """Like `SliceOutPolicy`, with the same windows for a whole fit: a federation then sends only these windows.

    Parameters
    ----------
    rate : float, optional
        See `SliceOutPolicy`.
    """

    name = "slice_out_fit"

    def __init__(self, rate: float | None = None) -> None:
        super().__init__(rate, "fit")


def _inner_widths(profile: CostProfile) -> tuple[Width, ...]:
    """Return the widths all of whose layers may be trained."""
    trained = {
        parameter.rpartition(".")[0] for g in profile.graph.groups for parameter in g.parameters
    }
    return tuple(
        width
        for width in profile.graph.widths
        if trained.issuperset((*width.makers, *(reader.module for reader in width.readers)))
    )


def _left_out(memory: PolicyMemory) -> set[str]:
    """Return the widths that an earlier fit found to need all channels; the memory may come from disk."""
    names = memory.facts.get("left_out", ())
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _sends_windows(windows: Windows) -> bool:
    """Return whether a fit trains and sends only one window; otherwise sending is charged for whole tensors."""
    return windows.every == "fit"


def _with_groups(narrow: PlanRequest, request: PlanRequest) -> PlanRequest:
    """Return the request for steps on windows, but with the groups of the whole model, which are sent."""
    graph = replace(narrow.profile.graph, groups=request.profile.graph.groups)
    return replace(narrow, profile=replace(narrow.profile, graph=graph))


def _sent(request: PlanRequest, narrow: PlanRequest, windows: Windows, modes: list[Mode]) -> float:
    return (narrow if _sends_windows(windows) else request).uplink_bytes(modes)


def _memory(request: PlanRequest, narrow: PlanRequest, modes: list[Mode]) -> float:
    """Return the bytes of a step on windows; earlier optimiser state and copies are those of the whole model."""
    weights = [float(each.profile.parameter_bytes.sum()) / 4 for each in (request, narrow)]
    kept = (request.profile.optimizer_bytes_per_weight + 4) * (weights[0] - weights[1])
    return float(step_memory(narrow.profile, modes).total + kept)


def _fits_bytes(
    request: PlanRequest, narrow: PlanRequest, windows: Windows, modes: list[Mode]
) -> bool:
    memory, uplink = request.budget.memory, request.budget.uplink
    if uplink is not None and _sent(request, narrow, windows, modes) > uplink * (1 + 1e-9):
        return False
    return memory is None or _memory(request, narrow, modes) <= memory
