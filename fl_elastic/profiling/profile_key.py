"""The model, batch, optimiser and device for which a cost profile is valid."""

from __future__ import annotations

import hashlib
import platform
from functools import cache

import torch
from torch import nn

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import batch_shape
from fl_elastic.profiling.optimizers import OptimizerFn, made_by
from fl_elastic.profiling.profile import ProfileKey

__all__ = ["model_device", "model_digest", "profile_key"]

_NEVER_OFF = ("lr", "initial_lr", "eps", "alpha")


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU for a model without parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def model_digest(model: nn.Module) -> str:
    """Return a digest of the model's class and of the name, shape and flag of each parameter."""
    parts = [type(model).__name__]
    parts += [f"{name}{tuple(p.shape)}{p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def profile_key(
    model: nn.Module, batch: Batch, optimizer_fn: OptimizerFn | None = None
) -> ProfileKey:
    """Return the key of profiles of ``model`` with this batch shape, this optimiser and its device."""
    device = model_device(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return ProfileKey(
        model=model_digest(model),
        batch_shape=batch_shape(batch),
        threads=torch.get_num_threads(),
        device=f"{device.type}: {name}",
        torch_version=torch.__version__,
        optimizer="" if optimizer_fn is None else _optimizer_case(model, optimizer_fn),
    )


def _optimizer_case(model: nn.Module, optimizer_fn: OptimizerFn) -> str:
    """Return the optimiser's class and the settings that are on, on which its time and its state depend."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return ""
    made = made_by(optimizer_fn, model)
    settings = {
        name
        for group in made.param_groups
        for name, value in group.items()
        if name not in _NEVER_OFF and isinstance(value, int | float) and value
    }
    return " ".join([type(made).__name__, *sorted(settings)])


@cache
def _processor() -> str:
    """Return the processor's name; cached, because with many cores reading the file takes milliseconds."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
