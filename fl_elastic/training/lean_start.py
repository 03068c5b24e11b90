"""Train without loading torch's compiler: a process that lives for one message has no use for it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

__all__ = ["without_compiler"]

_NAME = "torch._dynamo"


def without_compiler() -> None:
    """Let torch's optimizers do without ``torch._dynamo`` until somebody compiles.

    Every optimizer imports all of it when it is made and when it steps, for two functions that do nothing outside
    of a compiler: more than a second of computing and a hundred megabytes on a fast machine, several seconds on
    a small board, in every round. Here these two stand in its place; whatever else is asked of it, as
    ``torch.compile`` does, loads the real one.
    """
    if _NAME not in sys.modules:
        stand_in = _StandIn(_NAME, "Stands for torch's compiler until it is needed.")
        sys.modules[_NAME] = stand_in
        # As an attribute too, or else torch would find the real one by itself.
        setattr(torch, "_dynamo", stand_in)  # noqa: B010


class _StandIn(ModuleType):
    """The two functions of ``torch._dynamo`` that optimizers call, and a way to the real module."""

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing, as outside of a compiler."""

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function: there is no compiler to hide it from."""
        return (lambda each: each) if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        # Asked by the import system about any module; the answer of an ordinary one.
        if name in ("__file__", "__wrapped__", "__warningregistry__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            setattr(torch, "_dynamo", importlib.import_module(_NAME))  # noqa: B010
        return getattr(sys.modules[_NAME], name)
