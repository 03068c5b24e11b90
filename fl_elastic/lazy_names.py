"""Load a package's names when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loaded_late(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that loads names when they are first used.

    The process of a deployed client handles a single message, and on a small board every unneeded import takes time
    in each round.

    Parameters
    ----------
    package : str
        ``__name__`` of the package.
    homes : mapping of str to str
        For each public name the module that defines it: a module of the package with a different name, or the full
        name of any module. If the object has another name in that module, this name follows after a colon.

    Examples
    --------
    >>> load, names = loaded_late("fl_elastic.groups", {"tensor_groups": "trace"})
    >>> load("tensor_groups").__name__
    'tensor_groups'
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original = homes[name].partition(":")
        home = import_module(module if "." in module else f"{package}.{module}")
        value = getattr(home, original or name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})
