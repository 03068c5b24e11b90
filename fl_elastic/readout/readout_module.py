"""A model that ends where its head reads: the body up to the places, poolings, and a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError, PlanError
from fl_elastic.groups.forward import call_model, first_input
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.torch_private import uncompiled
from fl_elastic.groups.untouched import preserved_rng, untouched
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.mirrored import mean_of_views, with_mirror_images
from fl_elastic.readout.model_end import ModelEnd
from fl_elastic.readout.place import BODY, INPUT, Place, Reading
from fl_elastic.readout.poolings import pooling_for
from fl_elastic.readout.projection import Projection
from fl_elastic.update.manifest import READ_FROM, refuse_other_places


class Readout(nn.Module):
    """A model whose outputs come from a linear layer that reads one or several places of another model.

    It is an ordinary module: its forward pass ends at the last of the places, and its state holds the part of the
    other model that is needed for this, the layer, and the names of the places. It shares the other model's
    parameters and does not change that model.

    Parameters
    ----------
    model : nn.Module
        The model whose first part is used.
    places : str, Reading or sequence of Place
        Places to read, such as ``features.3@grid8+features.6@grid4``, or ``features.6@grid8>256`` for features that
        are projected onto 256 directions; with the prefix ``mirrored:``, features are means over each image and its
        mirror image.
    inputs : any
        Inputs of a batch, in the model's form, for the shapes. No example is kept.
    outputs : int
        Number of outputs of the layer.

    Attributes
    ----------
    body : nn.Module
        The model without modules that run after the last place, or not at all.
    head : nn.Linear
        The layer, with zero weights until it is solved for or trained.
    end : ModelEnd
        Function that the model applies to the output of its own last layer, such as ``log_softmax``; the readout
        applies the same.
    reading : Reading
        Places and number of directions.
    projection : Projection or None
        Projects the features onto fewer directions, which are zero until they are loaded.

    Raises
    ------
    PlanError
        If no place is named, a place is not in the model, its shape does not suit its pooling, or the inputs to be
        mirrored hold no images.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> images = torch.zeros(5, 3, 8, 8)
    >>> readout = Readout(model, "1@grid2+input@grid1", images, outputs=10)
    >>> readout.head.in_features, readout(images).shape
    (19, torch.Size([5, 10]))
    >>> [name for name, _ in readout.named_parameters()]
    ['body.0.weight', 'body.0.bias', 'head.weight', 'head.bias']
    """

    read_from: Tensor

    def __init__(
        self, model: nn.Module, places: str | Reading | tuple[Place, ...], inputs: Any, outputs: int
    ) -> None:
        super().__init__()
        model = uncompiled(model)
        if isinstance(places, str):
            places = Reading.parse(places)
        self.reading = places if isinstance(places, Reading) else Reading(tuple(places))
        self.places = self.reading.places
        if not self.places:
            raise PlanError(
                f"{self.reading} names no place: choose one by fl_elastic.training.read_out"
            )
        inputs = self._views(inputs)
        modes = {name: module.training for name, module in model.named_modules()}
        with untouched(model), torch.no_grad():
            model.eval()
            self.end = _end_of(model, inputs)
            try:
                came_by, found = _passes(model, self.places, inputs)
                idle = came_by[-1][1]
                self.body, self._stops = _Copy(model).part(self.places, inputs, found, idle)
            finally:
                for name, module in model.named_modules():
                    module.training = modes[name]
        for name, module in self.body.named_modules():
            module.training = modes.get(name, model.training)
        self.training = model.training
        self.poolings = nn.ModuleList(
            pooling_for(place, each) for place, each in zip(self.places, found, strict=True)
        )
        self.projection, self._wide = None, 0
        with torch.no_grad():
            features = self._pooled(found)
            self._wide = features.shape[1]
            if self.reading.width:
                self.projection = Projection(features.shape[1], self.reading.width, features.device)
                features = self.projection(features)
        # The layer's initial weights are discarded, so drawing them must not change the random state.
        with preserved_rng():
            self.head = nn.Linear(
                features.shape[1], outputs, device=features.device, dtype=features.dtype
            )
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
        name = np.frombuffer(str(self.reading).encode(), dtype=np.uint8).copy()
        self.register_buffer(READ_FROM, torch.from_numpy(name))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs for inputs that the model takes: shape (N, outputs), or (N,) as those of the model."""
        inputs = self._views(kwargs or (args[0] if len(args) == 1 else args))
        found = reaching(self.body, self.places, inputs, stop=self._stops)
        return self.end.made_of(self.head(self._pooled(found)))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        given = {READ_FROM: state_dict.get(f"{prefix}{READ_FROM}")}
        # Before anything is copied, because tensors of another place may have the same names and shapes.
        refuse_other_places({READ_FROM: self.read_from}, given)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _views(self, inputs: Any) -> Any:
        return with_mirror_images(inputs) if self.reading.mirrored else inputs

    def _pooled(self, found: list[Tensor]) -> Tensor:
        rows = [pool(each) for pool, each in zip(self.poolings, found, strict=True)]
        features = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        if self._wide and features.shape[1] != self._wide:
            raise PlanError(
                f"{self.reading} gives {features.shape[1]} features per example for these inputs, and {self._wide} "
                "for those that it was made with, as inputs differ in size: pool it on a grid, or read the last "
                "layer"
            )
        if self.reading.mirrored:
            features = mean_of_views(features)
        return features if self.projection is None else self.projection(features)


def _end_of(model: nn.Module, inputs: Any) -> ModelEnd:
    """Return the end of a model; an end without scores if it cannot run to its end on these inputs."""
    try:
        return FirstPass.of(model, (inputs, inputs)).end
    # After the places a model may raise any exception on inputs that it does not expect.
    except Exception:
        return ModelEnd(None)


class _Reached(Exception):
    """Ends a forward pass that has passed every place."""


def reaching(
    model: nn.Module,
    places: tuple[Place, ...],
    inputs: Any,
    *,
    stop: bool = True,
    reached: Callable[[Place], None] | None = None,
) -> list[Tensor]:
    """Run a model until it has passed all places; return the tensor at each, integers as floats.

    Parameters
    ----------
    model : nn.Module
        The model, run in its present mode.
    places : tuple of Place
        In any order.
    inputs : any
        Inputs of a batch.
    stop : bool
        Whether to end the pass at the last place by an exception, which tracers cannot follow; otherwise it runs to
        its end.
    reached : callable, optional
        Called with each place when the pass reaches it.

    Raises
    ------
    PlanError
        If the model has no such module, or the pass does not reach it.
    ModelError
        If the object there is not a tensor.
    """
    found: dict[Place, Tensor] = {}
    for place in places:
        if place.module == INPUT:
            found[place] = _input_of(inputs)
    wanted = [place for place in places if place.module != INPUT]
    ended = _Reached()
    handles = []

    def note(place: Place, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise ModelError(
                f"place {place}: the module's output is a {type(tensor).__name__}, not a tensor: read from a "
                "module inside it, or after it"
            )
        # A module that runs several times is read at its first run.
        if place in found:
            return
        ends = stop and len(found) + 1 == len(places)
        # Cloned, because later operations may modify it in place.
        found[place] = _as_floats(tensor if ends else tensor.clone())
        if reached is not None:
            reached(place)
        if ends:
            raise ended

    if wanted:
        for place in wanted:
            module = _module(model, place)
            if place.at_input:
                handles.append(
                    # Before other hooks, which must not record the module's start if the pass ends here.
                    module.register_forward_pre_hook(
                        lambda _, given, named, place=place: note(
                            place, next(iter((*given, *named.values())), None)
                        ),
                        prepend=True,
                        with_kwargs=True,
                    )
                )
            else:
                handles.append(
                    module.register_forward_hook(
                        lambda _, __, output, place=place: note(place, output)
                    )
                )
        try:
            call_model(model, inputs)
        except _Reached as error:
            if error is not ended:
                raise
        finally:
            for handle in handles:
                handle.remove()
    missing = [str(place) for place in places if place not in found]
    if missing:
        raise PlanError(f"the model's forward pass does not run {', '.join(missing)}")
    return [found[place] for place in places]


def _module(model: nn.Module, place: Place) -> nn.Module:
    try:
        return model.get_submodule(place.module)
    except AttributeError:
        raise PlanError(
            f"place {place}: the model has no module {place.module!r}; fl-elastic plan MODEL --read lists places"
        ) from None


def kept_tensors(
    model: nn.Module, places: Iterable[Place], inputs: Any
) -> dict[Place, tuple[str, ...]]:
    """Return, by place, the names of the model's tensors that a readout from there contains.

    Parameters
    ----------
    model : nn.Module
        The model; it is not changed.
    places : iterable of Place
        In any order.
    inputs : any
        Inputs of a small batch.

    Raises
    ------
    ModelError
        If the model names its state differently than a readout does.
    """
    by_tensor: dict[tuple[str, bool], list[Place]] = {}
    for place in places:
        by_tensor.setdefault((place.module, place.at_input), []).append(place)
    firsts = tuple(same[0] for same in by_tensor.values())
    names = ModelState.of(model).tensors
    found: dict[Place, tuple[str, ...]] = {}
    with untouched(model), torch.no_grad():
        # Eval mode, because passes with dropout are never equal.
        model.eval()
        came_by, tensors = _passes(model, firsts, inputs)
        at = dict(zip(firsts, tensors, strict=True))
        copy = _Copy(model)
        # A module that is idle up to a place is idle up to all earlier places, so one copy serves all of them.
        for place, idle in reversed(came_by):
            body, _ = copy.part((place,), inputs, [at[place]], idle)
            kept = tuple(
                name.removeprefix(f"{BODY}.")
                for name in ModelState.of(nn.ModuleDict({BODY: body})).tensors
            )
            if not names.keys() >= set(kept):
                unlike = sorted(set(kept) - names.keys())[0]
                raise ModelError(
                    f"the model's state has other names, such as {unlike!r}, if the model is part of another "
                    "model: in a fleet the head of such a model can only read the input of its last layer"
                )
            found |= dict.fromkeys(by_tensor[place.module, place.at_input], kept)
    return found


def _input_of(inputs: Any) -> Tensor:
    found = first_input(inputs)
    if found is None:
        raise ModelError(f"place {INPUT}: inputs of type {type(inputs).__name__} hold no tensor")
    return _as_floats(found)


def _as_floats(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.float()


def _passes(
    model: nn.Module, places: tuple[Place, ...], inputs: Any
) -> tuple[list[tuple[Place, set[str]]], list[Tensor]]:
    """Return the places in the order of a pass, each with the modules idle until then, and the tensors there."""
    began: set[str] = set()
    ended: set[str] = set()
    names = [name for name, _ in model.named_modules()]

    def idle() -> set[str]:
        return _idle(names, began, ended)

    came_by = [(place, idle()) for place in places if place.module == INPUT]
    with _running_modules(model, began, ended):
        found = reaching(
            model, places, inputs, reached=lambda place: came_by.append((place, idle()))
        )
    return came_by, found


@contextmanager
def _running_modules(model: nn.Module, began: set[str], ended: set[str]) -> Iterator[None]:
    """Record the names of the modules that begin and end a run inside the context."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: began.add(name)))
        # Before other hooks, one of which may end the pass here.
        handles.append(
            module.register_forward_hook(lambda *_, name=name: ended.add(name), prepend=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Copy:
    """A copy of a model that shares its tensors, and in which modules that are not needed become no-ops."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._idle: set[str] = set()
        self._copied: nn.Module | None = None

    def part(
        self, places: tuple[Place, ...], inputs: Any, found: list[Tensor], idle: set[str]
    ) -> tuple[nn.Module, bool]:
        """Return the modules up to some places, and whether a pass must end there by an exception.

        Returns the model itself if it cannot be copied, or if its result changes without the idle modules.
        """
        body = self._without(idle)
        for stops in (False, True):
            if _gives(body, places, inputs, found, stops):
                return body, stops
        return self._model, True

    def _without(self, idle: set[str]) -> nn.Module:
        if not idle:
            return self._model
        if self._copied is None or not self._idle <= idle:
            # A layer may also hold a computed tensor, as with weight_norm, which cannot be copied.
            held = (value for module in self._model.modules() for value in vars(module).values())
            tensors = [*self._model.parameters(), *self._model.buffers()]
            tensors += [each for each in held if isinstance(each, Tensor)]
            try:
                self._copied = deepcopy(self._model, {id(tensor): tensor for tensor in tensors})
            # A model may hold objects that cannot be copied, and raise any exception.
            except Exception:
                return self._model
            self._idle = set()
        for name in idle - self._idle:
            parent, _, own = name.rpartition(".")
            if parent not in idle:
                setattr(self._copied.get_submodule(parent), own, _PassedBy())
        self._idle = idle
        return self._copied


def _gives(
    body: nn.Module, places: tuple[Place, ...], inputs: Any, expected: list[Tensor], stops: bool
) -> bool:
    """Return whether the body gives the expected tensors at the places."""
    try:
        found = reaching(body, places, inputs, stop=stops)
    # A model may raise any exception on inputs that it does not expect.
    except Exception:
        return False
    return all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def _idle(names: list[str], began: set[str], ended: set[str]) -> set[str]:
    """Return the modules that did not run, contain no module that ran, and are in no module that finished.

    A module that finished may have used the weights of a module inside it without running that module, as attention
    does with its output projection.
    """
    ran = {"", *began, *(outer for name in began for outer in _around(name))}
    return {name for name in names if name not in ran and not _around(name) & ended}


def _around(name: str) -> set[str]:
    """Return the names of the modules around a module.

    >>> sorted(_around("layers.0.conv"))
    ['layers', 'layers.0']
    """
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


class _PassedBy(nn.Module):
    """Replaces a module that the readout does not need; returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)
