"""Gates that choose for each example and layer in how many bits it is computed: DFQ, alone and in FracTrain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.training.changes import changes
from fl_elastic.training.frozen import training_statistics
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.fractrain import (
    few_bit_layers,
    kept_points,
    note_points,
    round_forward,
    rounded,
)
from fl_elastic_simulations.peers.plain_steps import put_back_on_error, take_steps
from fl_elastic_simulations.peers.task_data import steps_in_time

__all__ = ["Dfq", "FracTrainGated", "Gates"]

_GATE = "bit_gate"
# For activations and for gradients: FracTrain's stages.
_OPTIONS = ((3, 6), (4, 6), (6, 8), (8, 8))
_WHOLE = 3 * 32**2
_BETA = 1e-3


class Gates:
    """What gates chose in the last forward pass, and what that costs.

    Parameters
    ----------
    target : float
        Percent of the operations in 32 bits, weighed by their bits, that the gates are pulled to.

    Attributes
    ----------
    percent : float
        What the last forward pass cost; 0 before it.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.percent = 0.0
        self._costs: list[Tensor] = []
        self._whole: list[float] = []

    def begin(self) -> None:
        """Forget the last forward pass."""
        self._costs, self._whole = [], []

    def note(self, weights: Tensor, operations: int) -> None:
        """Take in what one layer does.

        Parameters
        ----------
        weights : Tensor
            One for the option that each example has, zero for the others; shape (N, options).
        operations : int
            Of one example.
        """
        squares = [a**2 + 2 * a * g for a, g in _OPTIONS]
        cost = weights.mean(0) @ weights.new_tensor(squares, dtype=weights.dtype)
        self._costs.append(operations * cost)
        self._whole.append(float(operations * _WHOLE))

    def penalty(self) -> Tensor:
        """Return what to add to the loss: the cost in layers of 32 bits, towards the target; beta as published."""
        if not self._costs:
            return torch.zeros(())
        cost, whole = torch.stack(self._costs).sum(), sum(self._whole)
        self.percent = 100 * float(cost.detach()) / whole
        sign = -1.0 if self.percent < self.target else 1.0
        return sign * _BETA * cost / (whole / len(self._whole))


class _Backward(torch.autograd.Function):
    """Lets values pass as they are, and rounds the gradients of each example in its own bits, at random."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weights,) = ctx.saved_tensors
        given = gradients[0]
        found = sum(
            _by_example(weights[:, place], given) * rounded(given, bits, stochastic=True)
            for place, (_, bits) in enumerate(_OPTIONS)
        )
        return found, None


def _by_example(weights: Tensor, like: Tensor) -> Tensor:
    return weights.reshape(-1, *[1] * (like.dim() - 1))


@contextmanager
def gated(model: nn.Module, target: float) -> Iterator[Gates]:
    """Run layers that have gates on the bits that these choose, inside the block.

    Parameters
    ----------
    model : nn.Module
        As `Dfq.prepare` returned it; as it was behind the block.
    target : float
        See `Gates`.

    Raises
    ------
    ModelError
        If one that should have a gate has none.
    """
    gates = Gates(target)
    chosen: dict[nn.Module, Tensor] = {}
    layers = _inner_layers(model)
    if any(_GATE not in each._modules for each in layers):
        raise ModelError("a layer of the model has no gate: call prepare first")

    def before(layer: Any, given: Any) -> Any:
        x = given[0]
        axis = x.dim() - 1 if isinstance(layer, nn.Linear) else 1
        places = [each for each in range(1, x.dim()) if each != axis]
        soft = layer.bit_gate(x.mean(places) if places else x).softmax(1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0)
        # Forward the best option alone, backward as if all of them were mixed.
        weights = hard + soft - soft.detach()
        chosen[layer] = weights
        mixed = sum(
            _by_example(weights[:, place], x) * round_forward(x, bits)
            for place, (bits, _) in enumerate(_OPTIONS)
        )
        return (mixed, *given[1:])

    def behind(layer: Any, given: Any, out: Tensor) -> Tensor:
        weights = chosen.pop(layer)
        positions = out[0].numel() // layer.weight.shape[0]
        gates.note(weights, layer.weight.numel() * positions)
        found: Tensor = _Backward.apply(out, weights.detach())
        return found

    with ExitStack() as stack:
        start = model.register_forward_pre_hook(lambda *_: gates.begin())
        stack.callback(start.remove)
        for layer in layers:
            for handle in (
                layer.register_forward_pre_hook(before),
                layer.register_forward_hook(behind),
            ):
                stack.callback(handle.remove)
        yield gates


def _inner_layers(model: nn.Module) -> list[Any]:
    """Return the layers that run on few bits; what has gates already has more layers at none of its ends."""
    return [layer for name, layer in few_bit_layers(model) if not name.endswith(_GATE)]


@register_peer("dfq")
class Dfq(Peer):
    """Train everything, each example in each layer in the bits that a gate chooses.

    The dynamic part of FracTrain (Fu et al., NeurIPS 2020), "-style". From its published code, by our notes of it:
    gates choose the bits of activations and gradients; the loss has beta 1e-3 times the cost added while it is
    above a target, and taken off while it is below; the target is 3 % of the operations in 32 bits. Assumed: a gate
    is one linear layer on the means of what enters its layer, options are FracTrain's four stages, the best one is
    taken and learnt straight through; costs are in layers of 32 bits; gates are averaged like all weights, and the
    model is tested without them. The first and the last layer stay as they are. Bits are faked, so that it takes
    the time of steps in 32 bits: a processor is not faster on fewer.
    """

    rule = "contributors"
    weighting = "examples"
    targets: ClassVar[tuple[float, ...]] = (3.0,)

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model with a gate in each layer that may run on few bits."""
        del loss_fn, batch
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for layer in _inner_layers(model):
                linear, weight = isinstance(layer, nn.Linear), layer.weight
                gate = nn.Linear(layer.in_features if linear else layer.in_channels, len(_OPTIONS))
                layer.add_module(_GATE, gate.to(weight.device, weight.dtype))
        return model

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train everything and the gates, at the target of the client's stage."""
        model, manifest = task.model, Manifest.of(task.model)
        base = weights_of(model, manifest)
        full = task.profile.full_step_seconds
        points = kept_points(task, self.name, len(self.targets))
        with put_back_on_error(model), gated(model, self.targets[points.stage]) as gates:
            taken = take_steps(
                task,
                model,
                lambda outputs, targets: task.loss_fn(outputs, targets) + gates.penalty(),
                steps_in_time(task, full),
            )
        names = dict.fromkeys([*taken.trained, *training_statistics(model)], taken.count)
        deltas = changes(model, manifest, base, names)
        result = taken.result(task, deltas, full)
        note_points(task, self.name, points, result.loss)
        return result


@register_peer("fractrain_gated")
class FracTrainGated(Dfq):
    """Train as `Dfq` does, at a target that rises once the client's loss has levelled off.

    FracTrain (Fu et al., NeurIPS 2020) with both of its parts: 1.5, 2, 2.5 and 3 % of the operations in 32 bits,
    from turning point to turning point as in `fl_elastic_simulations.peers.fractrain.FracTrain`.
    """

    targets: ClassVar[tuple[float, ...]] = (1.5, 2.0, 2.5, 3.0)
