"""Run a model only up to a cut, as inference, or only from a cut on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import MissedCut, ModelError
from fl_elastic.groups.batch import map_tensors
from fl_elastic.groups.batch_rows import count_rows, join_examples, map_rows, take_examples
from fl_elastic.groups.forward import call_model, channels_last
from fl_elastic.groups.graph import BackwardGraph, Cut
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.torch_private import is_observed, spared_group_norms
from fl_elastic.groups.untouched import RngState, modes_kept
from fl_elastic.ops.inference import fold, foldable_pairs
from fl_elastic.ops.watched import Watched, is_watching, watched
from fl_elastic.registry import first_line

_TOLERANCE = 1e-3

# Values of stand-ins for missing tensors, which must not affect the result; large ones reveal comparisons.
_STAND_INS = (0.0, 1e4, -1e4)


class SplitModel:
    """A model that is run in two parts, before and after a cut.

    Inside the block, `features` runs the frozen prefix as inference (no gradient, eval mode, channels last,
    BatchNorm folded into convolutions) and stops at the cut; `outputs` runs the rest on given features; the model's
    own forward works as usual. Modules before the cut are replaced by stand-ins; the model's code is not changed.

    Parameters
    ----------
    model : nn.Module
        The model; its prefix must not change inside the block.
    graph : BackwardGraph
        Graph of a step of this model.
    cut : Cut
        One of ``graph.cuts``.
    """

    def __init__(self, model: nn.Module, graph: BackwardGraph, cut: Cut) -> None:
        self.model = model
        self.cut = cut
        self._value = 0.0
        self._pairs = foldable_pairs(graph, model, below=cut.node)
        self._above = {
            name for group in graph.groups[: cut.groups_above] for name in group.parameters
        }
        self._traced_batch = graph.nodes[cut.node].shape[0]
        self._part = "whole"
        self._features: Tensor | None = None
        self._solid = False
        self._reached = False
        self._before: list[tuple[nn.Module, Any]] = []
        self._modes: list[tuple[nn.Module, bool]] = []

    @property
    def prefix_modules(self) -> list[nn.Module]:
        """The outermost modules that run entirely before the cut."""
        last = () if self.cut.at_input else (self.cut.module,)
        names = (*(name for name, _ in self.cut.skipped), *last)
        return [self.model.get_submodule(name) for name in names]

    @property
    def loose_tensors(self) -> list[tuple[str, Tensor]]:
        """Tensors, by name, that code outside of `prefix_modules` may use before the cut.

        These are parameters that lie below the cut or belong to no group, and buffers of modules that extend past
        the cut.
        """
        inside = {
            id(tensor)
            for module in self.prefix_modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        parts = self.cut.module.split(".")
        around = [".".join(parts[:depth]) for depth in range(len(parts))]
        named = [
            *(
                (n, parameter)
                for n, parameter in self.model.named_parameters()
                if n not in self._above
            ),
            *(
                (f"{name}.{own}", buffer)
                for name in around
                for own, buffer in self.model.get_submodule(name).named_buffers(recurse=False)
            ),
        ]
        return [(name, tensor) for name, tensor in named if id(tensor) not in inside]

    def __enter__(self) -> SplitModel:
        self._modes = [(m, m.training) for each in self.prefix_modules for m in each.modules()]
        for module in self.prefix_modules:
            module.eval()
        for name, shape in self.cut.skipped:
            self._shadow(self.model.get_submodule(name), self._standing_in(shape))
        for convolution, norm in self._pairs:
            self._fold(self.model.get_submodule(convolution), self.model.get_submodule(norm))
        self._shadow(self.model.get_submodule(self.cut.module), self._at_the_cut)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Restore the model before the block ends; a second call does nothing."""
        for module, before in reversed(self._before):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        for module, mode in self._modes:
            module.training = mode
        self._before, self._modes = [], []

    def features(self, inputs: Any) -> Tensor:
        """Return the tensor at the cut for ``inputs``, without a graph."""
        self._part = "prefix"
        try:
            with torch.no_grad():
                call_model(self.model, map_tensors(channels_last, inputs))
        except _Reached as reached:
            return reached.tensor
        finally:
            self._part = "whole"
        raise MissedCut(f"a step did not pass through the cut at {self.cut.module!r}")

    @contextmanager
    def given(self, features: Tensor) -> Iterator[None]:
        """Make the model run only from the cut on inside the block; its inputs have no effect.

        Code outside of modules still runs on the inputs before the cut; its results are replaced by ``features``.
        """
        self._part, self._features, self._reached = "suffix", features, False
        try:
            with spared_group_norms(self.model):
                yield
        finally:
            self._part, self._features = "whole", None
        if not self._reached:
            raise MissedCut(f"a step did not pass through the cut at {self.cut.module!r}")

    def outputs(self, inputs: Any, features: Tensor) -> Any:
        """Return the model's outputs for ``features``."""
        with self.given(features):
            return call_model(self.model, inputs)

    def check(self, inputs: Any) -> None:
        """Raise ModelError unless in eval mode both parts together have the outputs of the whole model.

        A hook below the cut is refused: it would not run on every batch, and a loss may use what the hook stores.
        """
        below = {id(each) for module in self.prefix_modules for each in module.modules()}
        for name, module in self.model.named_modules():
            # The output of the cut's module is the features, so its hook runs on every batch.
            last = name == self.cut.module and not self.cut.at_input
            if id(module) in below and is_observed(module, inputs_only=last):
                raise ModelError(
                    f"a forward hook on {name!r}, below the cut at {self.cut.module!r}, would miss most batches: "
                    "remove it if nothing uses what it sees"
                )
        try:
            with modes_kept(self.model), torch.no_grad():
                self.model.eval()
                before = Attributes.of(self.model)
                whole = call_model(self.model, inputs)
                # Objects that the model creates in its first pass exist from here on.
                held = Attributes.of(self.model)
                features = self.features(inputs)
                if changed := held.changed():
                    raise ModelError(
                        f"the part below {self.cut.module!r} keeps {changed[0]!r} from batch to batch"
                    )
                before.put_back()
                with watched() as seen:
                    parts = []
                    for value in _STAND_INS:
                        parts.append(self._parts(inputs, features, value))
                        before.put_back()
                if seen.read:
                    raise ModelError(
                        f"the model's code above the cut branches on values from below {self.cut.module!r}"
                    )
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"the model cannot be run from its cut at {self.cut.module!r} on: "
                f"{first_line(error)}"
            ) from error
        finally:
            self._value = 0.0
        if not all(_alike(whole, part) for part in parts):
            raise ModelError(
                f"the model gives other outputs when it is run from its cut at {self.cut.module!r} on"
            )

    def _parts(self, inputs: Any, features: Tensor, value: float) -> Any:
        """Return the outputs for features; stand-ins for the outputs of skipped modules hold ``value``."""
        self._value = value
        try:
            return self.outputs(inputs, features)
        except RuntimeError:
            # In-place code between modules needs stand-ins with real memory.
            self._solid = True
            return self.outputs(inputs, features)

    def check_constant(self, inputs: Any) -> tuple[int, ...]:
        """Return the shape of an example's features; raise ModelError unless they depend on that example alone.

        The check runs with modules in their training modes, because a functional dropout, or one that follows the
        mode of a module extending past the cut, is still active there. A model may read the values of a mask, as
        attention models do that skip a mask of ones; its features are then also compared beside masked and unmasked
        examples.
        """
        place = f"the part below {self.cut.module!r}"
        before = RngState.now()
        whole, read = self._watched(inputs, lambda tensor: True)
        if before.moved():
            raise ModelError(f"{place} draws random numbers, as a functional dropout does")
        if read and self._watched(inputs, lambda tensor: not _is_mask(tensor))[1]:
            raise ModelError(f"{place} branches on the values of the whole batch")
        if not whole.is_floating_point():
            raise ModelError(f"{place} outputs numbers of type {whole.dtype}")
        count = count_rows(inputs)
        if len(whole) != count:
            raise ModelError(f"{place} outputs {len(whole)} rows for {count} examples")
        if count > 1:
            half = count // 2
            apart, together = self.features(take_examples(inputs, slice(half))), whole[:half]
        else:
            others = map_rows(lambda tensor: torch.cat([tensor, tensor.roll(1, -1)]), inputs)
            apart, together = self.features(others)[:1], whole
        if not _alike(together, apart):
            raise ModelError(f"{place} mixes the examples of a batch, as batch statistics do")
        if read and not self._alike_beside_others(inputs):
            raise ModelError(f"{place} branches on the masks of the whole batch")
        return tuple(whole.shape[1:])

    def _watched(self, inputs: Any, which: Callable[[Tensor], bool]) -> tuple[Tensor, bool]:
        """Return the features, and whether computing them read values of the selected inputs in Python."""
        with watched() as seen:
            given = map_tensors(
                lambda tensor: tensor.as_subclass(Watched) if which(tensor) else tensor, inputs
            )
            return self.features(given).as_subclass(Tensor), seen.read

    def _alike_beside_others(self, inputs: Any) -> bool:
        """Return whether features are the same alone and beside examples whose masks end early or not at all."""
        open_ended = map_rows(lambda t: torch.ones_like(t) if _is_mask(t) else t, inputs)
        kinds = [inputs, open_ended, map_rows(lambda t: _ending(t) if _is_mask(t) else t, inputs)]
        try:
            apart = torch.cat([self.features(kind) for kind in kinds])
            return _alike(apart, self.features(join_examples(kinds)))
        except (RuntimeError, ValueError, IndexError):
            # An error, for example because the model cuts a batch to its longest example.
            return False

    def _shadow(self, module: nn.Module, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Override a module's ``forward`` by an instance attribute."""
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = make(module.forward)

    def _standing_in(self, shape: tuple[int, ...]) -> Callable[[Any], Callable[..., Any]]:
        def make(plain: Any) -> Callable[..., Any]:
            def forward(*arguments: Any, **keywords: Any) -> Any:
                if self._part != "suffix" or self._features is None:
                    return plain(*arguments, **keywords)
                batch = len(self._features) if shape[:1] == (self._traced_batch,) else shape[0]
                if self._solid:
                    stand_in = self._features.new_full((batch, *shape[1:]), self._value)
                else:
                    # It has the right shape for code between modules, but takes no memory or time.
                    stand_in = self._features.new_full((), self._value).expand(batch, *shape[1:])
                return stand_in.as_subclass(Watched) if is_watching() else stand_in

            return forward

        return make

    def _at_the_cut(self, plain: Any) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            if self._part == "suffix":
                self._reached = True
                return plain(self._features) if self.cut.at_input else self._features
            if self._part == "prefix":
                if self.cut.at_input:
                    raise _Reached((*arguments, *keywords.values())[0])
                raise _Reached(plain(*arguments, **keywords))
            return plain(*arguments, **keywords)

        return forward

    def _fold(self, convolution: nn.Module, norm: nn.Module) -> None:
        folded = fold(convolution, norm) if isinstance(convolution, nn.Conv2d) else None
        if folded is not None:
            self._shadow(convolution, lambda plain: self._in_prefix(folded, plain))
            self._shadow(norm, lambda plain: self._in_prefix(lambda inputs: inputs, plain))

    def _in_prefix(self, ours: Callable[[Tensor], Tensor], plain: Any) -> Callable[[Tensor], Any]:
        return lambda inputs: ours(inputs) if self._part == "prefix" else plain(inputs)


class _Reached(Exception):
    """Carries the tensor at the cut out of the model's forward."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def _is_mask(tensor: Tensor) -> bool:
    """Return whether this may be a mask: integers, all 0 or 1, with an entry for each part of an example."""
    plain = tensor.as_subclass(Tensor)
    whole = not plain.is_floating_point() and not plain.is_complex() and plain.dim() > 1
    return whole and bool(((plain == 0) | (plain == 1)).all())


def _ending(mask: Tensor) -> Tensor:
    """Return the mask with zeros in the second half of its last axis."""
    ended = mask.clone()
    ended[..., (mask.shape[-1] + 1) // 2 :] = 0
    return ended


def _alike(whole: Any, parts: Any) -> bool:
    """Return whether two outputs are equal up to the rounding of folded weights."""
    seen: list[list[Tensor]] = [[], []]
    for values, tensors in zip((whole, parts), seen, strict=True):

        def note(tensor: Tensor, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(tensor.float())
            return tensor

        map_tensors(note, values)
    if len(seen[0]) != len(seen[1]):
        return False
    return all(
        a.shape == b.shape
        and bool(((a - b).abs().max() <= _TOLERANCE * a.abs().max().clamp(min=1e-6)).item())
        for a, b in zip(*seen, strict=True)
    )
