"""A small synthetic model in the middle of training, for checks of importance scores."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups import Batch, tensor_groups
from fl_elastic.groups.torch_private import checkpoint_hook, hooked
from fl_elastic.optimizers import OptimizerFn, shadow_of
from fl_elastic.planning.importance import Probe

_OPTIMIZERS: dict[str, OptimizerFn] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class MadeUpTraining:
    """A model with BatchNorm, dropout and layers used twice, its optimiser with state, and batches.

    Attributes
    ----------
    model : nn.Module
        Has a frozen parameter, a module in eval mode, and gradients left from the last step.
    optimizer : torch.optim.Optimizer
        The optimiser, after two steps.
    optimizer_fn : callable
        The ``optimizer_fn(parameters)`` that made it.
    batches : list of batch
        Independent batches.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_fn: OptimizerFn
    batches: list[Batch]

    def probe(self, count: int, *, seed: int = 0) -> Probe:
        """Return a probe with ``count`` batches whose generator starts at ``seed``."""
        return Probe(
            model=self.model,
            loss_fn=nn.functional.cross_entropy,
            groups=tensor_groups(self.model, nn.functional.cross_entropy, self.batches[0]),
            batches=self.batches[:count],
            shadow_optimizer=self._shadow,
            generator=np.random.default_rng(seed),
        )

    def _shadow(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return shadow_of(self.optimizer, zip(own, parameters, strict=True))


def made_up_training(optimizer: str = "sgd", *, seed: int = 0, batches: int = 4) -> MadeUpTraining:
    """Return a model that has taken two training steps.

    Parameters
    ----------
    optimizer : {"plain", "sgd", "adam"}
        Plain SGD; SGD with momentum and weight decay; Adam with weight decay.
    seed : int
        Seed of weights and data.
    batches : int
        Number of batches, of 8 examples each.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            shared,
            nn.ReLU(),
            shared,
            nn.Flatten(),
            nn.Linear(4 * 16, 3),
        )
        data: list[Batch] = [
            (torch.randn(8, 2, 4, 4), torch.randint(3, (8,))) for _ in range(batches)
        ]
        model.get_parameter("0.bias").requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = _OPTIMIZERS[optimizer](trainable)
        for inputs, targets in data[:2]:
            made.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            made.step()
        shared[1].eval()
    return MadeUpTraining(model, made, _OPTIMIZERS[optimizer], data)


class Snapshot:
    """Record of everything that a probe must leave unchanged: model, gradients, optimiser, random, global state.

    A fit changes weights, optimiser state and random states; after a fit, too, all else must be unchanged
    (`foreign`).

    Examples
    --------
    >>> training = made_up_training()
    >>> before = Snapshot(training.model, training.optimizer)
    >>> _ = training.model(training.batches[0][0])
    >>> before.differences()[:2]
    ['buffer 1.running_mean', 'buffer 1.running_var']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._before = self._take()
        self._surroundings = _foreign(model, optimizer)

    def differences(self) -> list[str]:
        """Return the names of everything that has changed since, compared bit for bit."""
        now = self._take()
        names = [*self._before, *(name for name in now if name not in self._before)]
        return [name for name in names if self._before.get(name) != now.get(name)]

    def foreign(self) -> list[str]:
        """Return the names of changed objects of the user or of torch, apart from what training changes.

        These are hooks, attributes, classes and flags of modules and parameters, attributes of the optimiser,
        methods of its class and of torch's own, and settings of the process.

        Examples
        --------
        >>> training = made_up_training()
        >>> before = Snapshot(training.model)
        >>> training.model.note = 1
        >>> before.foreign()
        ['attributes of the model']
        """
        now = _foreign(self._model, self._optimizer)
        return [name for name, value in self._surroundings.items() if now.get(name) != value]

    def _take(self) -> dict[str, Any]:
        seen: dict[str, Any] = dict(_foreign(self._model, self._optimizer))
        for name, parameter in self._model.named_parameters():
            seen[f"weight {name}"] = _bits(parameter)
            seen[f"gradient of {name}"] = None if parameter.grad is None else _bits(parameter.grad)
            seen[f"requires_grad of {name}"] = parameter.requires_grad
        for name, buffer in self._model.named_buffers():
            seen[f"buffer {name}"] = _bits(buffer)
        for name, module in self._model.named_modules():
            seen[f"training mode of {name or 'the model'}"] = module.training
        for index, state in enumerate(self._optimizer.state.values() if self._optimizer else ()):
            for name, value in state.items():
                written = _bits(value) if isinstance(value, Tensor) else value
                seen[f"optimiser {name} of tensor {index}"] = written
        seen["torch's random state"] = _bits(torch.get_rng_state())
        kind, keys, *position = np.random.get_state(legacy=True)
        seen["numpy's random state"] = (kind, np.asarray(keys).tobytes(), *position)
        return seen


def _foreign(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return by name the objects that no fit may change or replace; contents of tensors are not included."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        of = name or "the model"
        hooks = {key: list(each) for key, each in vars(module).items() if key.endswith("_hooks")}
        seen[f"class of {of}"] = type(module)
        seen[f"attributes of {of}"] = sorted(vars(module))
        seen[f"hooks of {of}"] = hooks
        seen[f"methods of {of}"] = dict(vars(type(module)))
    for name, parameter in model.named_parameters():
        seen[f"flag of {name}"] = parameter.requires_grad
        seen[f"attributes of {name}"] = sorted(vars(parameter))
        seen[f"hooks of {name}"] = hooked(parameter)
    kinds = [nn.Module, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.Tensor]
    if optimizer is not None:
        seen["attributes of the optimiser"] = sorted(vars(optimizer))
        kinds += type(optimizer).__mro__[:-1]
    for kind in kinds:
        seen[f"methods of {kind.__name__}"] = dict(vars(kind))
    seen["torch's checkpoints"] = checkpoint_hook()
    seen["settings of the process"] = (
        gc.isenabled(), torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
    )  # fmt: skip
    return seen


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    values = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tuple(tensor.shape), values.view(torch.uint8).numpy().tobytes()
