"""Run a model whose layers keep only the tensors that a plan needs for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.mode import Mode
from fl_elastic.ops.lean_forward import LeanForward, has_foreign_forward, lean_forward


@contextmanager
def lean(
    model: nn.Module,
    modes: Mapping[str, Mode],
    channels: Mapping[str, Sequence[int]] | None = None,
    *,
    only_named: bool = False,
) -> Iterator[None]:
    """Inside the block, every layer of ``model`` keeps only the tensors that its mode needs for the backward pass.

    Layers named in ``modes`` run in their mode. All other convolutions and norms run as frozen if all their
    parameters are frozen. Activations keep a bit per element, max pooling a byte per output. Outputs do not change,
    nor do gradients, except those that a mode filters or restricts to channels. The caller sets which parameters
    require a gradient before entering. On leaving, also by an exception, all forward methods are restored. If
    blocks are nested, the innermost one takes effect.

    Parameters
    ----------
    model : nn.Module
        On any device.
    modes : mapping of str to Mode
        Mode per module name, as in ``model.named_modules()``.
    channels : mapping of str to sequence of int, optional
        The trained channels of each module whose mode is ``channels``.
    only_named : bool
        Whether layers that ``modes`` does not name are left unchanged.

    Raises
    ------
    PlanError
        If a name is not a module of the model, channels are missing, empty, out of range or listed twice, or a
        layer has no operation for its mode.
    """
    replaced: list[tuple[nn.Module, LeanForward | None]] = []
    planned = _forwards(model, modes, channels or {}, only_named=only_named)
    try:
        for module, forward in planned.items():
            replaced.append((module, module.__dict__.get("forward")))
            _set_forward(module, forward)
        yield
    finally:
        for module, previous in reversed(replaced):
            _set_forward(module, previous)


def _set_forward(module: nn.Module, forward: LeanForward | None) -> None:
    # An instance attribute shadows the method of the class.
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def _forwards(
    model: nn.Module,
    modes: Mapping[str, Mode],
    channels: Mapping[str, Sequence[int]],
    *,
    only_named: bool,
) -> dict[nn.Module, LeanForward | None]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in (*modes, *channels):
        if name not in modules:
            raise PlanError(f"layer {name!r} is not in the model, use a name of named_modules()")
    found: dict[nn.Module, LeanForward | None] = {}
    for name, module in modules.items():
        named = name in modes
        if has_foreign_forward(module) or (not named and (only_named or module in found)):
            continue
        mode = modes.get(name) or _default_mode(module)
        try:
            found[module] = lean_forward(module, mode, channels.get(name))
        except PlanError as error:
            raise PlanError(f"layer {name!r}: {error}") from error
        if named and found[module] is None and mode.kind in ("channels", "filtered"):
            raise PlanError(
                f"layer {name!r} is a {type(module).__name__} that cannot be trained as {mode}: train it whole"
            )
    return found


def _default_mode(module: nn.Module) -> Mode:
    """Return frozen for a layer without trained parameters (or without any parameters), else full."""
    trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return Mode.FULL if trained else Mode.FROZEN
