"""Freeze neurons whose outputs have stopped changing: the NEq-style policy, and the base of related policies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.methods.neurons.layers import NeuronLayers
from fl_elastic.methods.neurons.motion import Motion, Values
from fl_elastic.methods.neurons.outputs import (
    change_of,
    has_neurons,
    kept_inputs,
    neuron_outputs,
    with_kept,
)
from fl_elastic.methods.neurons.rows import Chosen, NeuronLayer, modes_of, neuron_layers
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest, PolicyMemory
from fl_elastic.profiling import CostProfile

_INPUT, _OUTPUT = "input/", "output/"
_WIDTH, _LEAST_WIDTH = 64, 4


class NeuronPolicy(Policy):
    """Base of the policies that measure how fast the outputs of neurons change from fit to fit.

    Before each fit the model runs on a few inputs, always the same ones, and each neuron's outputs are compared
    with those before the previous fit. Inputs and sketched outputs are kept on the device within ``memory_bytes``:
    they reveal as much as the data themselves.

    Parameters
    ----------
    mu : float
        Weight of the previous velocity, in [0, 0.5].
    examples : int
        Number of inputs on which outputs are compared; according to the papers a few, or even one, suffice.
    memory_bytes : int
        Bound on kept inputs and outputs; with less memory the sketch is rougher and the inputs are fewer.

    Raises
    ------
    PlanError
        If a parameter is out of range.
    """

    name: ClassVar[str]
    basis = "velocity of neurons"
    needs = Needs(modes=tuple(Mode.channels(ratio, "neuron") for ratio in (1 / 2, 1 / 4, 1 / 8)))

    def __init__(
        self,
        mu: float = 0.5,
        examples: int = 16,
        memory_bytes: int = 8 << 20,
    ) -> None:
        if not 0 <= mu <= 0.5:
            raise PlanError(f"mu {mu} must be in [0, 0.5]: velocities would grow without end")
        if examples < 1 or memory_bytes < 1:
            raise PlanError(
                f"examples {examples} and memory_bytes {memory_bytes} must be at least 1"
            )
        self.mu = mu
        self.examples, self.memory_bytes = examples, memory_bytes

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a layer of neurons besides its head."""
        if not self.layers(profile):
            raise PlanError(
                f"policy {self.name!r} chooses among the neurons of convolutions, linear layers and norms, and "
                "this model has none besides its head: use policy 'elastic'"
            )

    def layers(self, profile: CostProfile) -> dict[int, NeuronLayer]:
        """Return the layers whose neurons may be chosen, by group index."""
        return neuron_layers(profile)

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Compare the model's outputs with those before the last fit.

        A model that has not changed, for example because a round is repeated, does not count as an observation.

        Raises
        ------
        PlanError
            If ``memory_bytes`` do not suffice for the roughest sketch.
        """
        memory, seed = memory.of(self.name), int(probe.generator.integers(2**31))
        memory = replace(memory, facts={**memory.facts, "seed": seed})
        kept = _under(memory.arrays, _INPUT)
        inputs = with_kept(probe.batches[0], kept) if kept else None
        if inputs is None:
            memory = PolicyMemory(self.name, {"seed": seed})
            kept = kept_inputs(probe.batches[0], self.examples, self.memory_bytes // 2)
            inputs = with_kept(probe.batches[0], kept)
        modules = dict(probe.model.named_modules())
        names = [layer.name for layer in self.layers(profile).values()]
        names = [name for name in names if name in modules and has_neurons(modules[name])]
        width = int(memory.facts.get("width", _WIDTH))
        now = neuron_outputs(probe.model, names, inputs, width)
        used = sum(array.nbytes for array in kept.values())
        while used + sum(array.nbytes for array in now.values()) > self.memory_bytes:
            if width <= _LEAST_WIDTH:
                raise PlanError(
                    f"policy {self.name!r} keeps {used + sum(a.nbytes for a in now.values())} bytes of outputs at "
                    f"the least, memory_bytes is {self.memory_bytes}: raise it, or take fewer examples"
                )
            width //= 2
            now = neuron_outputs(probe.model, names, inputs, width)
        before = _under(memory.arrays, _OUTPUT)
        motion = Motion.at_rest(sum(array.shape[1] for array in now.values()))
        if {n: a.shape for n, a in before.items()} == {n: a.shape for n, a in now.items()}:
            change = change_of(before, now)
            if not change.any():
                return memory
            motion = _motion(memory).after(change, self.mu)
        arrays = {f"{_INPUT}{place}": array for place, array in kept.items()}
        arrays |= {f"{_OUTPUT}{name}": array for name, array in now.items()}
        arrays |= {n: getattr(motion, n) for n in ("change", "gain", "velocity")}
        facts = {**memory.facts, "width": width, "count": motion.count}
        return PolicyMemory(self.name, facts, arrays)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains the chosen neurons."""
        layers = self.layers(request.profile)
        chosen = self.choose(request, layers)
        modes = self.modes_for(request, chosen)
        names = request.profile.group_names
        channels = {
            names[group]: tuple(np.flatnonzero(rows).tolist())
            for group, rows in chosen.items()
            if modes[group].kind == "channels"
        }
        plan = request.plan(self.name, modes)
        return plan.having(NeuronLayers(everywhere=plan.lean, channels=channels))

    def modes_for(self, request: PlanRequest, chosen: Mapping[int, Chosen]) -> list[Mode]:
        """Return the modes of all groups; groups without neurons always train."""
        return modes_of(len(request.profile), chosen, request.reachable)

    @abstractmethod
    def choose(self, request: PlanRequest, layers: Mapping[int, NeuronLayer]) -> dict[int, Chosen]:
        """Return masks of the neurons to train, by group index; layers that were not observed train whole."""

    def by_chance(
        self, request: PlanRequest, layers: Mapping[int, NeuronLayer]
    ) -> dict[int, Values]:
        """Return positive scores in random order, the same for all plans of a fit."""
        seed = request.memory.of(self.name).facts.get("seed")
        generator = request.generator if seed is None else np.random.default_rng(int(seed))
        order = generator.permutation(sum(layer.neurons for layer in layers.values())) + 1.0
        ends = np.cumsum([layer.neurons for layer in layers.values()])[:-1]
        return dict(zip(layers, np.split(order, ends), strict=True)) if layers else {}

    def speeds(
        self, request: PlanRequest, layers: Mapping[int, NeuronLayer]
    ) -> dict[int, Values] | None:
        """Return the absolute velocity of each neuron by group index; None if there is none yet.

        Layers that were not observed are left out.
        """
        memory = request.memory.of(self.name)
        motion = _motion(memory)
        if not motion.known:
            return None
        sizes = _sizes(memory)
        ends = np.cumsum(list(sizes.values()))[:-1]
        velocities = dict(zip(sizes, np.split(np.abs(motion.velocity), ends), strict=True))
        return {
            group: velocities[layer.name]
            for group, layer in layers.items()
            if len(velocities.get(layer.name, ())) == layer.neurons
        }


@POLICIES.register("neq")
class NeqPolicy(NeuronPolicy):
    """Train the neurons that are not at equilibrium, and all groups without neurons: NEq-style.

    A neuron whose velocity is below ``eps`` is frozen for the next fit, and may leave equilibrium again (Bragagnolo
    et al., NeurIPS 2022). The method has no budget: if a step takes longer than allowed, fewer steps are taken. The
    first two fits train everything, because there is no velocity yet. The published code computes every gradient
    and erases some. Here gradients of frozen neurons are not computed, nothing runs backward below the deepest
    trained neuron, and a completely frozen norm keeps its running statistics.

    Parameters
    ----------
    eps : float
        Speed below which a neuron is at equilibrium.
    **more : Any
        See `NeuronPolicy`.
    """

    name: ClassVar[str] = "neq"
    needs_coverage = False
    reduces_uplink = False

    def __init__(self, eps: float = 1e-3, **more: Any) -> None:
        super().__init__(**more)
        if not eps >= 0:
            raise PlanError(f"eps {eps} must not be negative")
        self.eps = eps

    def choose(self, request: PlanRequest, layers: Mapping[int, NeuronLayer]) -> dict[int, Chosen]:
        """Return the neurons whose speed is at least ``eps``."""
        speeds = self.speeds(request, layers)
        return {} if speeds is None else {g: speed >= self.eps for g, speed in speeds.items()}


def _motion(memory: PolicyMemory) -> Motion:
    """Return the motion observed so far; motion at rest if the memory does not hold all of it."""
    arrays = [memory.arrays.get(name) for name in ("change", "gain", "velocity")]
    neurons = sum(_sizes(memory).values())
    found = [np.asarray(a, np.float64) for a in arrays if a is not None and a.shape == (neurons,)]
    if len(found) < 3 or not all(np.isfinite(array).all() for array in found):
        return Motion.at_rest(neurons)
    return Motion(int(memory.facts["count"]), *found)


def _sizes(memory: PolicyMemory) -> dict[str, int]:
    """Return the number of neurons of each observed layer, in the order in which they are kept."""
    return {name: array.shape[1] for name, array in _under(memory.arrays, _OUTPUT).items()}


def _under(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
