"""Check a table of settings against a dataclass, and report all problems at once.

The dataclass declares types, defaults and bounds; pydantic checks them. Values are not converted: text is not
accepted as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    AllowInfNan,
    ConfigDict,
    SkipValidation,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fl_elastic.errors import ElasticError
from fl_elastic.registry import closest

T = TypeVar("T")
_REFUSED = "refused"


def approved(check: Callable[[Any], Any]) -> AfterValidator:
    """Return a validator from a function that raises `ElasticError`, or returns the normalised value or None."""

    def validate(value: Any) -> Any:
        try:
            found = check(value)
        except ElasticError as error:
            raise PydanticCustomError(_REFUSED, "{problem}", {"problem": str(error)}) from None
        return value if found is None else found

    return AfterValidator(validate)


def known_among(what: str, names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return a validator that accepts only known names, looked up at each check because names may be added."""

    def check(value: str) -> None:
        known = list(names())
        if value not in known:
            raise ElasticError(
                f"unknown {what} {value!r}{closest(value, known)}: known are {', '.join(known)}"
            )

    return approved(check)


def _filled(value: str) -> None:
    if not value.strip():
        raise ElasticError("is empty; leave the key out for its default")


def _single(value: object) -> None:
    if not isinstance(value, (bool, int, float, str)):
        raise ElasticError(f"expected a number, true, false or text, got {_seen(value)}")


Text = Annotated[str, Strict(), approved(_filled)]
"""Text that is not empty."""
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
"""A finite number; an integer is accepted as well."""
Truth = Annotated[bool, Strict()]
Scalar = Annotated[bool | int | float | str, SkipValidation, approved(_single)]

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def read_settings(kind: type[T], table: object, problems: list[str], where: str = "") -> T | None:
    """Return a table as a dataclass; None if something in it is wrong.

    Parameters
    ----------
    kind : type
        A dataclass. Its fields have the types of this module, or are dataclasses, tuples and mappings of them;
        bounds are those of `annotated_types`.
    table : object
        The table as read from a file.
    problems : list of str
        List to which one line is added for each problem: its place, the value seen, and the expected value.
    where : str
        Place of the table ("fleet.0"), with which each line begins.

    Examples
    --------
    >>> from annotated_types import Ge
    >>> from dataclasses import make_dataclass
    >>> Fleet = make_dataclass("Fleet", [("device", Text), ("count", Annotated[Whole, Ge(1)], 1)])
    >>> read_settings(Fleet, {"device": "pi_5"}, [])
    Fleet(device='pi_5', count=1)
    >>> problems = []
    >>> read_settings(Fleet, {"cuont": 2}, problems, "fleet.0")
    >>> for problem in problems:
    ...     print(problem)
    fleet.0.device: missing; it needs text
    fleet.0.cuont: unknown key (did you mean 'count'?)
    """
    try:
        read: T = _adapter(cast(Hashable, kind)).validate_python([table])[0]
        return read
    except ValidationError as error:
        found = error.errors(include_url=False)
    for each in found:
        place = each["loc"][1:]
        path = ".".join(str(part) for part in (where, *place) if part != "")
        text = _text(kind, place, each)
        problems.append(f"{path}: {text}" if path else text)
    return None


@lru_cache  # building an adapter takes longer than reading a table with it
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # A dataclass of the standard library only uses this configuration if it is wrapped in a tuple type.
    holder: Any = GenericAlias(tuple, kind)
    return TypeAdapter(holder, config=ConfigDict(extra="forbid"))


def _text(kind: type, place: tuple[str | int, ...], error: Any) -> str:
    """Return the problem at one place, in this library's words."""
    seen, bounds = error["input"], error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"missing; it needs {_expected(_type_at(kind, place))}"
        case "unexpected_keyword_argument":
            owner = _type_at(kind, place[:-1])
            return f"unknown key{closest(str(place[-1]), list(keys_of(owner)))}"
        case "greater_than_equal":
            return f"{seen} is below {bounds['ge']:g}"
        case "greater_than":
            return f"{seen} is not above {bounds['gt']:g}"
        case "less_than_equal":
            return f"{seen} is above {bounds['le']:g}"
        case "less_than":
            return f"{seen} is not below {bounds['lt']:g}"
        case "finite_number":
            return f"{seen} is not a finite number"
        case _ if error["type"] == _REFUSED:
            return str(error["msg"])
    kind = _type_at(kind, place)
    if kind is float and type(seen) is int:  # too large for one
        return f"{seen} is not a finite number"
    return f"expected {_expected(kind)}, got {_seen(seen)}"


def _expected(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "a list of at least one"
    return _WORDS.get(kind, "a table")


def _type_at(kind: Any, place: Iterable[str | int]) -> Any:
    """Return the type that the dataclass declares at a place, without bounds and ``None``."""
    for part in place:
        if is_dataclass(kind):
            kind = keys_of(kind).get(str(part))
        else:  # of all entries of a tuple, or of all values of a mapping
            kind = get_args(kind)[0 if isinstance(part, int) else -1]
        kind = _plain(kind)
    return kind


def keys_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by their keys in a file."""
    hints = get_type_hints(kind, include_extras=True)
    return {_key(field.name, hints[field.name]): hints[field.name] for field in fields(kind)}


def _key(name: str, kind: Any) -> str:
    aliases = [each.alias for each in get_args(kind)[1:] if isinstance(each, FieldInfo)]
    return next((alias for alias in aliases if alias), name)


def _plain(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, UnionType, Union):
        kind = get_args(kind)[0]
    return kind


def _seen(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return repr(value)
