"""Train without loading torch's compiler, which a process that lives for one message does not need."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

__all__ = ["without_compiler"]

_COMPILER = "torch._dynamo"
_UTILS = "torch._dynamo.utils"


def without_compiler() -> None:
    """Let torch's optimizers and torchvision's models do without ``torch._dynamo`` until somebody compiles.

    Every optimizer imports all of it when it is made and when it steps, for two functions that do nothing outside
    of a compiler, and torchvision to ask whether there is one: more than a second of computing and a hundred
    megabytes on a fast machine, several seconds on a small board, in every round. Here these functions stand in
    its place; whatever else is asked of it, as ``torch.compile`` does, loads the real one.
    """
    if _COMPILER not in sys.modules:
        stand_in = sys.modules[_COMPILER] = _Compiler(_COMPILER)
        sys.modules[_UTILS] = _Utils(_UTILS)
        # As an attribute too, or else torch would find the real one by itself.
        setattr(torch, "_dynamo", stand_in)  # noqa: B010


class _StandIn(ModuleType):
    """A module with the functions at hand, and a way to the real one for all others."""

    def __getattr__(self, name: str) -> Any:
        # Asked by the import system about any module; the answer of an ordinary one. Only whoever imports a
        # part of the compiler asks for the path of its package.
        package = self.__name__ == _COMPILER
        if name.startswith("__") and not (package and name == "__path__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load_compiler()
        return getattr(sys.modules[self.__name__], name)


class _Compiler(_StandIn):
    """What optimizers call of ``torch._dynamo``."""

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing, as outside of a compiler."""

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function: there is no compiler to hide it from."""
        return (lambda each: each) if fn is None else fn


class _Utils(_StandIn):
    """What torchvision calls of ``torch._dynamo.utils``."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        """Return False as long as the compiler is not loaded; then what it says."""
        found = sys.modules.get(_UTILS)
        if found is None or isinstance(found, _StandIn):
            return False
        return found.is_compile_supported(device_type)


def _load_compiler() -> None:
    if isinstance(sys.modules.get(_COMPILER), _StandIn):
        del sys.modules[_COMPILER]
        if isinstance(sys.modules.get(_UTILS), _StandIn):
            del sys.modules[_UTILS]
        setattr(torch, "_dynamo", importlib.import_module(_COMPILER))  # noqa: B010
        importlib.import_module(_UTILS)
