"""Train without loading torch's compiler, which a process that lives for one message does not need."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_UTILS = "torch._dynamo.utils"


def without_compiler() -> None:
    """Replace ``torch._dynamo`` by a stand-in until something is compiled.

    Every torch optimiser imports the whole compiler when the optimiser is made and when it steps, for two functions
    that do nothing outside of a compiler; torchvision imports it to ask whether there is a compiler. In every round
    this takes more than a second of computing and a hundred megabytes on a fast machine, several seconds on a small
    board. The stand-in has these functions. Any other access, such as by ``torch.compile``, loads the real module.
    """
    if _COMPILER not in sys.modules:
        stand_in = sys.modules[_COMPILER] = _Compiler(_COMPILER)
        sys.modules[_UTILS] = _Utils(_UTILS)
        # Set as an attribute too, or torch would find the real module by itself.
        setattr(torch, "_dynamo", stand_in)  # noqa: B010


class _StandIn(ModuleType):
    """A module that has the functions needed without a compiler, and loads the real module for all others."""

    def __getattr__(self, name: str) -> Any:
        # The import system looks up dunder names in any module; respond as an ordinary module does. Only an import
        # of a submodule of the compiler looks up the package's __path__.
        package = self.__name__ == _COMPILER
        if name.startswith("__") and not (package and name == "__path__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load_compiler()
        return getattr(sys.modules[self.__name__], name)


class _Compiler(_StandIn):
    """The functions of ``torch._dynamo`` that optimisers call."""

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing, as outside of a compiler."""

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function: there is no compiler to hide it from."""
        return (lambda each: each) if fn is None else fn


class _Utils(_StandIn):
    """The function of ``torch._dynamo.utils`` that torchvision calls."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        """Return False while the compiler is not loaded, then the compiler's own answer."""
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
