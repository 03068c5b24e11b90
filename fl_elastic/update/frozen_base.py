"""The part of a model that nobody trains: it is on every device already, and travels as a digest alone."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FROZEN_BASE", "base_digest", "hex_of", "travelling"]

FROZEN_BASE = "fl_elastic.frozen_base"
"""Name of the digest among a model's weights; no tensor of a torch model has it by accident."""

_DIGEST = 16


def travelling(model: nn.Module) -> list[str]:
    """Return the names of the tensors that a federation has to send, in the order of the model's state.

    All of them, unless some floating parameters have ``requires_grad=False`` and others have not. Then those that
    may be trained, and of the buffers what training changes: floating ones, with the counters of one number beside
    them. Not among these are the statistics of a norm whose parameters are all frozen, which runs in eval mode,
    and what belongs to weights that are kept as integers.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> travelling(model) == list(model.state_dict())
    True
    >>> _ = model[:2].requires_grad_(False)
    >>> travelling(model)
    ['2.weight', '2.bias']
    """
    from fl_elastic.groups.trainable import trainable

    state = list(model.state_dict(keep_vars=True))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    flags = {name: trainable(each) for name, each in parameters.items()}
    frozen = any(parameters[name].is_floating_point() for name, flag in flags.items() if not flag)
    if not frozen or not any(flags.values()):
        return state
    moving = {name for name, flag in flags.items() if flag} | _moving_buffers(model, flags)
    return [name for name in state if name in moving]


def _moving_buffers(model: nn.Module, flags: dict[str, bool]) -> set[str]:
    """Return the names of the buffers that training may change."""
    from fl_elastic.groups.torch_private import NormWithStatistics

    found: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        own = [flags[f"{start}{name}"] for name, _ in module.named_parameters(recurse=False)]
        held = isinstance(module, NormWithStatistics) and bool(own) and not any(own)
        buffers = dict(module.named_buffers(recurse=False))
        floating = [name for name, each in buffers.items() if each.is_floating_point()]
        others = [name for name in buffers if name not in floating]
        counters = [name for name in others if buffers[name].numel() == 1]
        # Scales of weights that are quantised stay with them.
        as_integers = len(counters) < len(others) and not any(own)
        if floating and not held and not as_integers:
            found |= {start + name for name in (*floating, *counters)}
    return found


def base_digest(model: nn.Module, names: Collection[str]) -> NDArray[np.uint8] | None:
    """Return a digest of the names, types and values of tensors other than ``names``; None if there are none.

    Raises
    ------
    UpdateError
        If one of them has no values as yet.
    """
    from fl_elastic.groups.forward import tensor_bytes

    others = {name: each for name, each in model.state_dict().items() if name not in names}
    if not others:
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for name, tensor in others.items():
        if tensor.is_meta:
            raise UpdateError(
                f"tensor {name!r} is on the meta device, without values: load the model's weights first"
            )
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}/".encode())
        digest.update(tensor_bytes(tensor))
    return np.frombuffer(digest.digest(), np.uint8)


def hex_of(digest: NDArray[Any]) -> str:
    """Return a digest as text.

    Raises
    ------
    UpdateError
        If it is none.
    """
    if digest.dtype != np.uint8 or digest.shape != (_DIGEST,):
        raise UpdateError(
            f"{FROZEN_BASE!r} is {digest.dtype} of shape {digest.shape}, expected {_DIGEST} bytes: take it from "
            "weights_of(model, Manifest.of(model))"
        )
    return digest.tobytes().hex()
