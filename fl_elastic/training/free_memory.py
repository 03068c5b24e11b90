"""Return free memory to the system where the C library would keep it for later."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

_WORTH_IT = 8e6
_LEAST, _MOST = 2e6, 5e6
_NEAR, _STEP, _CODE = 0.25, 1 / 20, 40e6
# Share of the bytes between two checks below which a layer alone is no reason for one.
_FEW = 1 / 64


class FreeMemory:
    """Returns free memory to the system while a model trains, when the process comes near its memory budget.

    glibc keeps the memory that large tensors leave behind and often cannot use it again, so that a process grows to
    several times what is in use. No setting of the process is changed: an operator's ``MALLOC_*`` settings hold.

    Parameters
    ----------
    budget : float
        Bytes that training may take beyond inference.
    resident : callable
        Returns the bytes that the process holds now, or None if they are not known.
    trim : callable
        Returns free memory to the system.
    """

    def __init__(
        self,
        budget: float,
        *,
        resident: Callable[[], int | None] | None = None,
        trim: Callable[[], None] | None = None,
    ) -> None:
        self._budget = budget
        self._resident, self._trim = resident or resident_bytes, trim or give_back
        self._ceiling = self._passed = self._base = 0.0
        self._step = min(max(_STEP * budget, _LEAST), _MOST)
        if budget >= _WORTH_IT:
            self._trim()
            self._base = float(self._resident() or 0)

    @contextmanager
    def watching(self, model: nn.Module, inference: float) -> Iterator[None]:
        """Check the memory before every layer inside the block, forward and backward.

        Parameters
        ----------
        model : nn.Module
            Its layers without children are watched.
        inference : float
            Bytes that an inference takes besides the weights.
        """
        if self._budget < _WORTH_IT or self._resident() is None:
            yield
            return
        room = max(_NEAR * self._budget, self._budget - _CODE)
        self._ceiling = self._base + inference + room
        layers = [module for module in model.modules() if not any(True for _ in module.children())]
        # A library may copy the weights of a convolution into a layout of its own.
        ordered = {
            layer: sum(
                parameter.nbytes
                for parameter in layer.parameters(recurse=False)
                if parameter.dim() > 2
            )
            for layer in layers
        }
        needed: dict[nn.Module, int] = {}

        def before(layer: nn.Module, _: Any) -> None:
            self.look(needed.get(layer, inference))

        def after(layer: nn.Module, given: Any, output: Any) -> None:
            passed = sum(tensor.nbytes for tensor in (*given, output) if isinstance(tensor, Tensor))
            needed[layer] = size = passed + ordered[layer]
            if not isinstance(output, Tensor) or output.grad_fn is None:
                return
            if size < _FEW * self._step:
                # A check takes longer than such a layer.
                self._passed += size
            else:
                output.grad_fn.register_prehook(lambda _: self.look(size))

        handles: list[Any] = [layer.register_forward_pre_hook(before) for layer in layers]
        handles += [layer.register_forward_hook(after) for layer in layers]
        # So that free memory left by the previous step does not add to the needs of the first layers.
        handles.append(model.register_forward_pre_hook(lambda *_: self.look(inference)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look(self, needed: float = 0.0) -> None:
        """Return free memory to the system if the next ``needed`` bytes would exceed the budget.

        Nothing is checked until the bytes needed since the last check are a twentieth of the budget, or 5 MB.
        """
        if self._budget < _WORTH_IT:
            return
        self._passed += needed
        if self._passed <= self._step:
            return
        self._passed, now = 0.0, self._resident()
        if now is not None and now + needed > self._ceiling:
            self._trim()


def give_back() -> None:
    """Return free memory to the system, if the C library can."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def resident_bytes() -> int | None:
    """Return the bytes of private memory of this process, without code; None if the platform does not report it."""
    with suppress(OSError, ValueError, IndexError):
        file = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            fields = os.read(file, 128).split()
        finally:
            os.close(file)
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return None


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    with suppress(OSError, AttributeError, TypeError):
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None
