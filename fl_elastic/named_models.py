"""Models by name: registered ones, torchvision's, and those built by a user's own module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_elastic.errors import ModelError, RegistryError
from fl_elastic.laboratory import laboratory_install
from fl_elastic.registry import Registry, closest, first_line, from_module, or_own

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Builder = Callable[[Shape, int], "nn.Module"]

MODELS: Registry[Builder] = Registry("model", "fl_elastic.models")
"""Builders ``(input shape, classes) -> model`` by name."""

# With auxiliary outputs, the forward pass of these models in training returns a tuple, which losses do not accept.
_WITH_AUXILIARY = ("googlenet", "inception_v3")


def build_model(name: str, input_shape: Shape, classes: int, seed: int) -> nn.Module:
    """Return a new model whose initial weights depend only on the arguments.

    The global random state of torch is unchanged.

    Parameters
    ----------
    name : str
        A registered model; else a torchvision classification model, also as ``torchvision:NAME``;
        else ``module:callable``, which is called without arguments and has its own sizes.
    input_shape : tuple of int
        Shape of one input, channels first.
    classes : int
        Number of outputs.
    seed : int
        Seed of the initial weights.

    Raises
    ------
    ModelError
        If the model is unknown, cannot be built, or does not accept such inputs.

    Examples
    --------
    >>> build_model("torch.nn:Identity", (4,), 2, seed=0)
    Identity()
    """
    import torch

    if classes < 1 or not input_shape or min(input_shape) < 1:
        raise ModelError(
            f"{name}: no model has inputs of shape {input_shape} and {classes} classes"
        )
    with torch.random.fork_rng(devices=[]):
        build = _builder(name, input_shape, classes)  # may import, which may draw numbers itself
        # torch.manual_seed would seed accelerators as well, which fork_rng does not restore here.
        torch.default_generator.manual_seed(seed)
        return build()


def _builder(name: str, input_shape: Shape, classes: int) -> Callable[[], nn.Module]:
    if name in MODELS:
        return partial(MODELS.get(name), input_shape, classes)
    check_model_name(name)
    if ":" not in name or name.startswith("torchvision:"):
        need_image(name, input_shape, pixels=1, channels=3)
    return model_builder(name, classes)


def check_model_name(name: str) -> None:
    """Raise ModelError, naming the nearest known name, unless ``name`` can be looked up.

    Parameters
    ----------
    name : str
        As in :func:`build_model`. ``module:callable`` is not imported here.
    """
    if name in MODELS:
        return
    prefix, colon, rest = name.partition(":")
    if colon and prefix != "torchvision":
        if prefix and rest:
            return
    elif (rest if colon else name) in torchvision_names():
        return
    raise unknown_model(name, MODELS.names())


def shape_of(text: str) -> Shape:
    """Return the shape of one input from a text such as 3,32,32; ModelError if it is not a shape."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ModelError(f"input {text!r} is not a shape such as 3,32,32")
    return shape


def need_image(name: str, shape: Shape, *, pixels: int, channels: int | None = None) -> None:
    """Raise ModelError unless inputs are images with these channels and at least this many pixels a side."""
    if len(shape) != 3 or min(shape[1:]) < pixels or (channels and shape[0] != channels):
        wanted = f"{channels or 'any number of'} channels and at least {pixels}x{pixels} pixels"
        raise ModelError(f"{name} takes images of {wanted}, not inputs of shape {shape}")


def model_builder(spec: str, classes: int | None = None) -> Callable[[], nn.Module]:
    """Return the function that builds a model, after importing everything that it needs.

    An import may draw random numbers. So everything is imported here: a caller who sets a seed before calling the
    function always gets the same weights.

    Parameters
    ----------
    spec : str
        A torchvision classification model (``resnet18`` or ``torchvision:resnet18``), built
        without weights; or ``module:callable``, a function without arguments that returns a model.
        Modules of the current working directory can be imported.
    classes : int, optional
        Number of outputs of a torchvision model; its own number (1000) by default.

    Raises
    ------
    ModelError
        If there is no such model; the function raises it if the model cannot be built.
    """
    prefix, colon, name = spec.partition(":")
    if colon and prefix != "torchvision":
        return _from_module(spec, name)
    return _from_torchvision(spec, name if colon else spec, classes)


def unknown_model(spec: str, also: list[str]) -> ModelError:
    """Return the error for an unknown model name, with the nearest known name.

    Parameters
    ----------
    spec : str
        The unknown name.
    also : list of str
        Known names besides those of torchvision.
    """
    name = spec.removeprefix("torchvision:")
    hint = closest(name, [*also, *torchvision_names()])
    known = f"{', '.join(also)}, " if also else ""
    return ModelError(
        f"unknown model {spec!r}{hint}: give {known}a torchvision classification model"
        f"{'' if torchvision_names() else ' (torchvision is not installed)'}{or_own(name)}"
        f"{'' if also else '; small models by name come with ' + laboratory_install()}"
    )


@cache
def torchvision_names() -> tuple[str, ...]:
    """Return the names of torchvision's classification models; none if it is not installed.

    They are read from its source files, because importing it takes seconds, too long to report a mistyped name.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return ()
    files = (Path(found.origin).parent / "models").glob("*.py")
    return tuple(sorted(name for file in files for name in _registered_in(file)))


def _registered_in(file: Path) -> Iterator[str]:
    """Yield the names of a file's functions that torchvision registers as models."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(each) == "register_model()" for each in node.decorator_list
        ):
            yield node.name


def _from_torchvision(spec: str, name: str, classes: int | None) -> Callable[[], nn.Module]:
    try:
        from torchvision import models
    except ImportError:
        raise ModelError(
            f"model {spec!r}: torchvision is not installed: python -m pip install torchvision, "
            "or give module:callable"
        ) from None
    if name not in torchvision_names():
        raise unknown_model(spec, MODELS.names())
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if name in _WITH_AUXILIARY:
        options.update(aux_logits=False, init_weights=True)
    return partial(models.get_model, name, weights=None, **options)


def _from_module(spec: str, attribute: str) -> Callable[[], nn.Module]:
    from torch import nn

    try:
        found = from_module("model", spec)
    except RegistryError as error:
        raise ModelError(str(error)) from error
    if isinstance(found, nn.Module) or not callable(found):
        raise ModelError(
            f"model {spec!r}: {attribute} is {_kind(found)}, not a function that builds a model"
        )

    def build() -> nn.Module:
        try:
            model = found()
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"model {spec!r}: calling {attribute}() failed: {first_line(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"model {spec!r}: {attribute}() returned {_kind(model)}, not a torch.nn.Module"
            )
        return model

    return build


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
