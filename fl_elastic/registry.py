"""Registries of named plug-ins, which validate names and suggest the nearest name for an unknown one.

Built-in names are listed where a registry is defined, names of published methods in the folders of
`fl_elastic.methods`, and names from other packages in their entry points.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from fl_elastic.errors import RegistryError

T = TypeVar("T")
Made = TypeVar("Made")

# Imported by name when needed: plug-ins import the registry, and the registry must not import them.
_METHODS = "fl_elastic.methods"
_NAME = re.compile(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]")


def closest(name: str, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the nearest known name; empty if none is near.

    >>> closest("elastik", ["elastic", "full"])
    " (did you mean 'elastic'?)"
    """
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def or_own(name: str) -> str:
    """Return the end of an error message for an unknown ``name``, which offers ``module:callable`` instead.

    >>> or_own("digit"), or_own("my_project.read")
    (', or module:callable', ", or module:callable, as in 'my_project:read'")
    """
    module, dot, attribute = name.partition(":")[0].rpartition(".")
    written = f", as in {f'{module}:{attribute}'!r}" if module and dot and attribute else ""
    return f", or module:callable{written}"


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message.

    >>> first_line(ValueError("one" + chr(10) + "two"))
    'ValueError: one'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def from_module(kind: str, spec: str) -> Any:
    """Return the object that ``module:attribute`` names; the current working directory is searched, too.

    Parameters
    ----------
    kind : str
        Kind of the object, as in an error message ("model").
    spec : str
        The module, a colon, and the name in it, which may have dots.

    Raises
    ------
    RegistryError
        If the form is wrong, or the module cannot be imported or has no such name.

    Examples
    --------
    >>> from_module("number", "math:pi")
    3.141592653589793
    >>> from_module("number", "math:pie")
    Traceback (most recent call last):
    fl_elastic.errors.RegistryError: number 'math:pie': math has no 'pie' (did you mean 'pi'?)
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise RegistryError(f"{kind} {spec!r} is not of the form module:callable")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # The folder stays on the path, because the object may import other modules from it later.
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise RegistryError(
            f"{kind} {spec!r}: cannot import {module_name}: {first_line(error)}"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [name for name in dir(found) if not name.startswith("_")]
            raise RegistryError(
                f"{kind} {spec!r}: {module_name} has no {attribute!r}{closest(part, known)}"
            ) from None
    return found


@lru_cache
def _installed(look: Callable[..., EntryPoints], group: str) -> EntryPoints:
    """Return the entry points of a group; cached, because searching installed packages takes six milliseconds."""
    return look(group=group)


class Registry(Generic[T]):
    """Names mapped to plug-ins of one kind, which a decorator registers.

    Parameters
    ----------
    kind : str
        Kind of the plug-ins, as in an error message ("policy").
    group : str, optional
        Group of entry points by which installed packages add plug-ins. The value of an entry point is the module
        that registers its name; the module is imported only when the name is used.
    modules : mapping of str to str, optional
        Modules of this package that register a name, imported in the same way.
    listed_as : str, optional
        Attribute of each folder of `fl_elastic.methods` that lists further ones: a mapping of names to the folder's
        modules that register them.

    Examples
    --------
    >>> codecs: Registry[type] = Registry("codec")
    >>> @codecs.register("plain")
    ... class Plain: ...
    >>> codecs.names()
    ['plain']
    >>> codecs.get("plane")
    Traceback (most recent call last):
    fl_elastic.errors.RegistryError: unknown codec 'plane' (did you mean 'plain'?): known are plain
    """

    def __init__(
        self,
        kind: str,
        group: str | None = None,
        modules: Mapping[str, str] | None = None,
        listed_as: str | None = None,
    ) -> None:
        self.kind = kind
        self._group = group
        self._listed_as = listed_as
        self._modules = dict(modules or {})
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds a plug-in under ``name``.

        Raises
        ------
        RegistryError
            If the name is not lower-case snake case or is already taken.
        """
        if not _NAME.fullmatch(name):
            raise RegistryError(
                f"{self.kind} name {name!r} is not lower-case words joined by underscores"
            )
        if name in self._entries:
            raise RegistryError(f"{self.kind} name {name!r} is already registered; choose another")

        def add(entry: T) -> T:
            own = self._home(name)
            if own is not None and own != getattr(entry, "__module__", None):
                raise RegistryError(f"{self.kind} name {name!r} is {own}'s; choose another")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the plug-in registered under ``name``; RegistryError lists the known names."""
        if name not in self._entries:
            self._load(name)
        if name not in self._entries:
            raise self._unknown(name)
        return self._entries[name]

    def check(self, name: str) -> None:
        """Raise RegistryError, which lists the known names, for an unknown one; nothing is imported."""
        if name not in self:
            raise self._unknown(name)

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted({*self._entries, *self._modules, *self._listed(), *self._plugins().names})

    def _unknown(self, name: str) -> RegistryError:
        known = self.names()
        near = closest(str(name), known)
        return RegistryError(f"unknown {self.kind} {name!r}{near}: known are {', '.join(known)}")

    def _load(self, name: str) -> None:
        """Import the module that registers a name, if one is known."""
        home = self._home(name)
        if home is not None:
            import_module(home)
        elif name in self._plugins().names:
            self._plugins()[name].load()

    def _home(self, name: str) -> str | None:
        """Return the module of this package that registers a name; None if the name is not this package's."""
        return self._modules.get(name) or self._listed().get(name)

    def _listed(self) -> dict[str, str]:
        """Return the names that the folders of methods list; only each folder's `__init__` is imported."""
        if self._listed_as is None:
            return {}
        methods = import_module(_METHODS)
        found: dict[str, str] = {}
        for each in iter_modules(methods.__path__, f"{_METHODS}."):
            listed = getattr(import_module(each.name), self._listed_as, {})
            found |= {name: f"{each.name}.{module}" for name, module in listed.items()}
        return found

    def _plugins(self) -> EntryPoints:
        return EntryPoints() if self._group is None else _installed(entry_points, self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        # The installed packages come last: searching them takes milliseconds.
        own = name in self._entries or name in self._modules
        return own or name in self._listed() or name in self._plugins().names


class Factories(Registry[Callable[..., Made]], Generic[Made]):
    """A registry of classes, or of other callables, that return one kind of plug-in.

    Examples
    --------
    >>> rules: Factories[list[int]] = Factories("rule")
    >>> rules.register("empty")(list)
    <class 'list'>
    >>> rules.make("empty")
    []
    """

    def make(self, name: str | Made, *given: Any) -> Made:
        """Return a new object of the plug-in registered under ``name``, or ``name`` itself if it is an object.

        Raises
        ------
        RegistryError
            If nothing is registered under the name, or a class is given instead of an object.
        """
        if isinstance(name, str):
            return self.get(name)(*given)
        self.check(name)
        return name

    def check(self, name: str | Made) -> None:
        """Raise RegistryError for an unknown name, for a class, and for anything that is not a plug-in."""
        if isinstance(name, str):
            super().check(name)
        elif isinstance(name, type):
            raise RegistryError(
                f"{self.kind} {name.__name__} is a class: give a name or an object, as in {name.__name__}()"
            )
        elif name is None or isinstance(name, (int, float, bytes, list, tuple, dict, set)):
            raise RegistryError(
                f"{self.kind} {name!r} is a {type(name).__name__}: give a name or an object"
            )

    def name_of(self, given: str | Made) -> str:
        """Return the name under which a plug-in is registered, or else the name of its class.

        >>> rules: Factories[list[int]] = Factories("rule")
        >>> rules.name_of("empty"), rules.name_of([])
        ('empty', 'list')
        """
        if isinstance(given, str):
            return given
        known = (name for name, entry in self._entries.items() if entry is type(given))
        return next(known, type(given).__name__)
