"""The request to a policy: costs, budget and importance, and how much of the budget a step and its update take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.budget import Budget, too_much_to_send
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import Block
from fl_elastic.groups.mode import sent_bytes
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.step_transform import StepCase, StepTransform
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes, step_memory
from fl_elastic.profiling.profile import Mask, Seconds

if TYPE_CHECKING:
    from fl_elastic.planning.importance.fidelity import Fidelity


MOST_BYTES = 32 << 20
"""Most bytes of the arrays that a policy remembers, which are written to disk after every fit."""
STEP_GAIN_EXPONENT = 0.5
"""Exponent a in gain ~ steps^a, by which a deadline trades steps against groups.

It is below 1 because in federated rounds, where clients drift apart, further steps are worth less. With 1, runs on
CIFAR-10 ended 1.8 and 3.4 points lower.
"""
_KINDS = "fiub"


@dataclass(frozen=True, eq=False)
class PolicyMemory:
    """Facts and arrays of one policy; empty before its first fit.

    Attributes
    ----------
    owner : str
        The policy that it belongs to: another policy starts with an empty memory.
    facts : mapping of str to value
        Values that JSON can represent.
    arrays : mapping of str to array
        Real numbers, at most `MOST_BYTES` together.

    Raises
    ------
    PlanError
        If the arrays are larger, or hold something else.

    Examples
    --------
    >>> import numpy as np
    >>> memory = PolicyMemory("mine", {"round": 3}, {"seen": np.ones(2, np.float16)})
    >>> memory.of("mine").nbytes, memory.of("another").nbytes
    (4, 0)
    """

    owner: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            if array.dtype.kind not in _KINDS:
                raise PlanError(f"array {name!r} of a policy's memory has type {array.dtype}")
        if self.nbytes > MOST_BYTES:
            raise PlanError(
                f"policy {self.owner!r} would keep {self.nbytes} bytes from fit to fit, at most {MOST_BYTES} are "
                "allowed: keep less of them"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def of(self, owner: str) -> PolicyMemory:
        """Return this memory if it is ``owner``'s, else an empty one."""
        return self if self.owner == owner else PolicyMemory(owner)


NO_MEMORY = PolicyMemory()
"""Memory of a policy before its first fit."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Everything that a policy may look at.

    Attributes
    ----------
    profile : CostProfile
        Costs of each group on this device.
    budget : Budget
        What may be spent.
    importance : array, shape (N,)
        Present worth of each group; zeros for policies that do not ask for it.
    steps : int
        Local steps of the round, over which a deadline is spread.
    correction : float
        Measured over predicted step time, learned during training.
    allowed_override : float, optional
        Allowed step seconds that replace the budget's.
    fidelity : Fidelity, optional
        How much of each group's gradient the cheaper modes keep.
    reachable : int, optional
        Number of groups, from the loss on, that may be trained; None for all.
    sending_seconds_per_byte : float
        Seconds per step that sending one byte takes, see `CostProfile.with_sending`.
    generator : numpy.random.Generator
        The only source of randomness.
    memory : PolicyMemory
        What the policy remembers from fit to fit.
    """

    profile: CostProfile
    budget: Budget
    importance: Scores
    steps: int = 1
    correction: float = 1.0
    allowed_override: float | None = None
    fidelity: Fidelity | None = None
    reachable: int | None = None
    sending_seconds_per_byte: float = 0.0
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    memory: PolicyMemory = NO_MEMORY

    @property
    def allowed_step_seconds(self) -> float:
        """Largest step time in the profile's seconds, corrected by measurements."""
        if self.allowed_override is not None:
            return self.allowed_override
        full = self.profile.full_step_seconds
        return self.budget.allowed_step_seconds(full, self.steps) / self.correction

    @property
    def may_trade_steps(self) -> bool:
        """Whether a plan may take fewer, costlier steps.

        A deadline limits the round, so the number of steps and the groups are chosen together. A speed-up limits
        each step; fewer steps are allowed only if not even the head fits.
        """
        floor = self.profile.floor_step_seconds
        return self.budget.speedup is None or self.allowed_step_seconds < floor

    def allowing(self, step_seconds: float) -> PlanRequest:
        """Return the same request with another allowed step time."""
        return replace(self, allowed_override=step_seconds)

    def with_transform(self, transform: StepTransform) -> PlanRequest:
        """Return the same request, with the same allowed time, for steps changed by a transform."""
        profile = transform.case(StepCase(self.profile)).profile
        return replace(self.allowing(self.allowed_step_seconds), profile=profile)

    def head_mask(self) -> Mask:
        """Return the mask of the head alone, including other heads that the traced batch did not use."""
        mask = np.zeros(len(self.profile), dtype=bool)
        head = self.profile.graph.head
        mask[[head, *(group for group in self.profile.graph.unused if group < head)]] = True
        return mask

    def expected_decrease(self, mask: Mask) -> float:
        """Return the importance of ``mask`` times the gain of the whole steps that fit the budget."""
        return float(self.expected_decreases(mask[None])[0])

    def expected_decreases(self, masks: Mask) -> Scores:
        """Return `expected_decrease` of many non-empty masks at once, shape (K, N) to (K,)."""
        sending = self.sending_seconds_per_byte * (masks @ self.profile.sent_bytes)
        share = (self.allowed_step_seconds - sending) / (self.profile.seconds_of(masks) - sending)
        return masks @ self.importance * self._gains(share)

    def gain_of(self, modes: Sequence[Mode], step_seconds: float) -> float:
        """Return the gain of the whole steps of a plan with these modes, less the time to send their bytes."""
        trained = np.array([not mode.is_frozen for mode in modes])
        left = self.allowed_step_seconds - self.sending_seconds_per_byte * self.uplink_bytes(modes)
        return self.gain(left / (step_seconds - self._sending_seconds(trained)))

    def gain(self, share: float) -> float:
        """Return the gain of this share of the steps, rounded down to whole steps."""
        return float(self._gains(np.array([share]))[0])

    def _gains(self, shares: Seconds) -> Seconds:
        # A speed-up holds on average, so it may be exceeded by half a step; a deadline may not.
        grace = 0.0 if self.budget.deadline is not None else 0.5
        shares = np.where(np.isfinite(shares), shares.clip(min=0.0), 1.0)
        taken = np.floor(shares * self.steps + grace + 1e-9)
        return np.minimum(taken / self.steps, 1.0) ** STEP_GAIN_EXPONENT

    def _sending_seconds(self, mask: Mask) -> float:
        """Return the seconds per step that the profile charges for sending the groups in ``mask``."""
        return self.sending_seconds_per_byte * float(self.profile.sent_bytes[mask].sum())

    def fits(self, mask: Mask) -> bool:
        """Return whether ``mask`` trains only the first `reachable` groups, and fits time, memory and uplink."""
        if self.reachable is not None and mask[self.reachable :].any():
            return False
        in_time = self.profile.step_seconds(mask) <= self.allowed_step_seconds * (1 + 1e-9)
        return in_time and self.fits_bytes(mask)

    def fits_bytes(self, mask: Mask) -> bool:
        """Return whether a step of ``mask`` fits memory and uplink."""
        memory, uplink = self.budget.memory, self.budget.uplink
        sent = float(self.profile.sent_bytes[mask].sum())
        if uplink is not None and sent > uplink:
            return False
        # A quick lower bound: the gradients and optimiser state alone.
        gradients = float(self.profile.parameter_bytes[mask].sum())
        if (
            memory is not None
            and gradients * (1 + self.profile.optimizer_bytes_per_weight / 4) > memory
        ):
            return False
        return memory is None or mask_bytes(self.profile, mask, lean=self.lean) <= memory

    def fits_modes(self, modes: Sequence[Mode]) -> bool:
        """Return whether these modes train only `reachable` groups and fit all limits without recomputation."""
        if self.reachable is not None and not all(m.is_frozen for m in modes[self.reachable :]):
            return False
        memory, uplink = self.budget.memory, self.budget.uplink
        return (
            self.profile.plan_seconds(modes) <= self.allowed_step_seconds * (1 + 1e-9)
            and (uplink is None or self.uplink_bytes(modes) <= uplink)
            and (memory is None or step_memory(self.profile, modes, lean=self.lean).total <= memory)
        )

    @property
    def lean(self) -> bool:
        """Whether all layers are run by `fl_elastic.ops`, which keep less; true if memory is limited.

        These operations have no second derivative, so a model that needs one runs with torch's operations.
        """
        return self.budget.memory is not None and not self.profile.graph.is_of_second_order

    def uplink_bytes(self, modes: Sequence[Mode]) -> float:
        """Return the bytes that a plan sends as fp32; a layer trained by channels sends those channels."""
        pairs = zip(self.profile.graph.groups, modes, strict=True)
        return sum(sent_bytes(group, mode) for group, mode in pairs)

    def plan(self, policy: str, modes: Sequence[Mode], recomputed: Sequence[Block] = ()) -> Plan:
        """Return the plan that trains each group in its mode.

        If it exceeds the memory budget, blocks are recomputed until it fits.

        Raises
        ------
        BudgetError
            If it still exceeds the memory, or exceeds the uplink, which fewer steps cannot change.
        """
        profile, budget = self.profile, self.budget
        memory = step_memory(profile, modes, lean=self.lean, recomputed=recomputed).total
        if budget.memory is not None and memory > budget.memory:
            # Imported here: only needed if the memory is exceeded.
            from fl_elastic.planning.recompute import cheapest_recomputation, least_memory

            found = cheapest_recomputation(profile, modes, budget.memory, lean=self.lean)
            if found is None:
                least = math.ceil(least_memory(profile, modes, lean=self.lean))
                raise BudgetError(
                    f"policy {policy!r} needs {least} bytes for a step at the least, memory budget is "
                    f"{budget.memory:.0f}: raise it to {least} or lower the batch size{self._instead()}"
                )
            recomputed, memory = found.blocks, found.bytes
        sent = self.uplink_bytes(modes)
        if budget.uplink is not None and sent > budget.uplink * (1 + 1e-9):
            reason = too_much_to_send(budget, sent, f"policy {policy!r}")
            raise BudgetError(f"{reason}{self._instead()}")
        allowed = self._allowed_besides_sending(policy, sent)
        transforms = self._transforms(modes, recomputed)
        again = sum(transform.seconds(profile) for transform in transforms)
        everything = np.ones(len(profile), dtype=bool)
        trained = np.array([not mode.is_frozen for mode in modes])
        return Plan(
            policy=policy,
            groups=profile.graph.groups,
            modes=tuple(modes),
            full_step_seconds=profile.full_step_seconds - self._sending_seconds(everything),
            predicted_step_seconds=profile.plan_seconds(modes)
            + again
            - self._sending_seconds(trained),
            floor_step_seconds=profile.floor_step_seconds - self._sending_seconds(self.head_mask()),
            allowed_step_seconds=allowed,
            sending_seconds=self.sending_seconds_per_byte * sent * self.steps,
            predicted_step_bytes=memory,
            layers=profile.graph.group_layers,
            transforms=transforms,
        )

    def _transforms(
        self, modes: Sequence[Mode], recomputed: Sequence[Block]
    ) -> tuple[StepTransform, ...]:
        """Return the transforms that run these modes within the memory."""
        found: list[StepTransform] = []
        if self.lean or any(mode.needs_operations for mode in modes):
            # Imported here: plans that train layers whole, with memory to spare, do not need it.
            from fl_elastic.planning.lean_layers import LeanLayers

            found.append(LeanLayers(everywhere=self.lean))
        if recomputed:
            # Imported here: only needed if the memory is exceeded.
            from fl_elastic.planning.recompute import Recomputation

            found.append(Recomputation(tuple(block.module for block in recomputed)))
        return tuple(found)

    def refusal(self, what: str, memory: float, sent: float) -> BudgetError:
        """Return the error for a step that exceeds memory or uplink, with each exceeded limit and a sufficient one.

        Parameters
        ----------
        what : str
            Beginning of the message: what does not fit, including the colon.
        memory, sent : float
            Bytes that the step takes, and bytes of its update.
        """
        budget, reasons = self.budget, []
        if budget.memory is not None and memory > budget.memory:
            least = math.ceil(memory)
            reasons.append(
                f"it needs {least} bytes of memory, the budget is {budget.memory:.0f}: raise it to {least} or "
                "lower the batch size"
            )
        if budget.uplink is not None and sent > budget.uplink:
            reasons.append(too_much_to_send(budget, sent))
        return BudgetError(f"{what} {'; and '.join(reasons)}")

    def head_refusal(self) -> BudgetError:
        """Return the error for a budget whose memory or uplink do not admit the head."""
        head = self.head_mask()
        sent = float(self.profile.sent_bytes[head].sum())
        memory = mask_bytes(self.profile, head, lean=self.lean)
        return self.refusal("not even the head fits:", memory, sent)

    def _instead(self) -> str:
        return ", or use policy 'elastic'" if self.fits_bytes(self.head_mask()) else ""

    def _allowed_besides_sending(self, policy: str, sent: float) -> float:
        """Return the allowed time per step without the time for sending the update."""
        allowed = self.allowed_step_seconds - self.sending_seconds_per_byte * sent
        if self.sending_seconds_per_byte > 0 and not allowed > 0:
            seconds = self.sending_seconds_per_byte * sent * self.steps
            raise BudgetError(
                f"sending the {sent:.0f} bytes that policy {policy!r} trains takes {seconds:.3g} s, and "
                f"{self.budget.deadline:.3g} s of the deadline are left: allow more, or use a policy that selects, "
                "such as 'elastic'"
            )
        return allowed

    def plan_of_mask(self, policy: str, mask: Mask) -> Plan:
        """Return the plan that trains the groups in ``mask`` in full."""
        return self.plan(policy, self.modes_of(mask))

    def modes_of(self, mask: Mask) -> list[Mode]:
        """Return the modes that train the groups in ``mask`` in full."""
        return [Mode.FULL if on else Mode.FROZEN for on in mask]
