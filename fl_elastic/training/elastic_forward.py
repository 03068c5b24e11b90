"""Training steps whose frozen prefix runs as inference, or whose features are read from a store."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_elastic.errors import BudgetError, ModelError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair, batch_size
from fl_elastic.groups.batch_rows import count_rows, layout_of, sizes_of, take_examples
from fl_elastic.groups.forward import batch_shape, channels_last, is_one_argument, refusing_misfits
from fl_elastic.groups.graph import BackwardGraph, Cut
from fl_elastic.groups.sample_ids import SampleId, sample_ids
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.split import SplitModel
from fl_elastic.planning.step_transform import StepTransform
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.prefix import StoreTerms
from fl_elastic.profiling.profile import model_device
from fl_elastic.registry import first_line
from fl_elastic.training.feature_codec import FeatureCodec, fingerprint
from fl_elastic.training.feature_store import FeatureStore
from fl_elastic.training.options import ForwardOptions
from fl_elastic.training.report import ForwardReport

_LOG = logging.getLogger("fl_elastic")
_Said = TypeVar("_Said")
# Examples by which stored features are compared with those of the present prefix.
_FEW = 2
# What torch raises when a part of a model, or of a batch, does not fit.
_MISFITS = (RuntimeError, ValueError, TypeError, IndexError)


class ElasticForward:
    """Runs steps of one fit with the frozen prefix as inference.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    options : ForwardOptions
        How the forward pass runs.
    examples, epochs : int
        Size of one epoch, and requested epochs of the fit: the gain of a store depends on them.
    clock : callable
        Returns the time in seconds.
    groups_above : int, optional
        Number of groups above the fleet's cut, at which the prefix then ends under every plan.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ForwardOptions,
        *,
        examples: int,
        epochs: int,
        clock: Clock,
        groups_above: int | None = None,
    ) -> None:
        self.options = options
        self.prefix_seconds = 0.0
        self.refused = ""
        self._model = model
        self._examples = examples
        self._epochs = epochs
        self._clock = clock
        self._proofs: dict[str, _Proof | None] = {}
        self._proof: _Proof | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._layout: tuple[tuple[str, str], ...] = ()
        self._device = model_device(model)
        self._split: SplitModel | None = None
        self._whole = False
        self._cut = ""
        self._groups_above = groups_above
        self._locked: int | None = None
        self._key: tuple[str, ...] = ()
        self._computed = self._found = self._since_found = 0
        self._met: set[SampleId] = set()
        self._meetings = self._since_new = 0
        self._store: FeatureStore | None = None
        if options.feature_bytes and (epochs > 1 or options.path is not None):
            self._store = FeatureStore(options.feature_bytes, options.precision, options.path)

    @property
    def locked_groups(self) -> int | None:
        """Number of groups that may be trained without losing the features stored so far; None if no limit."""
        if self._groups_above is not None:
            return self._groups_above
        return self._locked if self._store is not None and len(self._store) else None

    @property
    def lasts(self) -> bool:
        """Whether features are kept as long as the fleet's cut stays, so that most steps only look them up."""
        return self._groups_above is not None and self._store is not None and self._store.lasts

    @property
    def computed(self) -> int:
        """Examples whose prefix was computed so far."""
        return self._computed

    @property
    def terms(self) -> StoreTerms | None:
        """Properties of the store that the planner uses; None without a store."""
        if self._store is None:
            return None
        # Once features are stored, a plan that stays above their cut only pays for the look-up.
        found = self._groups_above is None and self.locked_groups is not None
        return self.options.terms(self._examples, math.inf if found or self.lasts else self._epochs)

    @contextmanager
    def splitting(
        self,
        graph: BackwardGraph,
        depth: int,
        batch: Batch,
        transforms: Sequence[StepTransform] = (),
    ) -> Iterator[None]:
        """Run the prefix below the group at ``depth`` as inference inside the block, if there is a cut for it.

        Parameters
        ----------
        graph : BackwardGraph
            The model's graph.
        depth : int
            The plan's depth.
        batch : batch
            The next batch.
        transforms : sequence of StepTransform
            The plan's transforms: they may change the features.
        """
        key = tuple(part for transform in transforms for part in transform.feature_key())
        # A shallower plan can use the stored features, unless its transforms change them.
        useful = self._groups_above is not None or key == self._key
        deepest = max(depth, (self.locked_groups or 0) - 1) if useful else depth
        self._key = key
        cut = None if self._whole or not self._has_rows(batch) else graph.cut_below(deepest)
        with ExitStack() as stack:
            if cut is not None:
                split = stack.enter_context(SplitModel(self._model, graph, cut))
                place = _place(cut, transforms)
                self._proof = self._proof_of(split, place, batch)
                if self._proof is not None:
                    self._split, self._cut = split, cut.module
                    stack.callback(self._leave)
                    self._open_store(split, cut, place, as_pair(batch)[0])
                else:
                    # Without a split, steps of the whole model need its own forward methods and modes.
                    stack.close()
            elif graph.unused:
                names = ", ".join(graph.groups[group].name for group in graph.unused[:3])
                self.refused = (
                    f"no elastic forward pass: the traced batch did not use {names}, so another batch may take "
                    "another path through the model"
                )
            yield

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Make the model run on the features of ``batch`` inside the block, if a prefix is split off."""
        if self._split is None:
            yield
            return
        inputs, _ = as_pair(batch)
        assert self._proof is not None
        # Code between skipped modules sees the shapes that these had in the trace.
        if self._split.cut.skipped and not self._proof.holds_for(inputs):
            self._computed += batch_size(batch)
            yield
            return
        started = self._clock()
        with refusing_misfits(batch):
            features = self._features(self._split, inputs)
        self.prefix_seconds += self._clock() - started
        with self._split.given(features):
            yield

    def go_whole(self, reason: str) -> None:
        """Run the rest of the fit on the whole model, without a split."""
        if self._split is not None:
            self._split.leave()
        self._split, self._whole = None, True
        self.refused = f"no elastic forward pass: {reason}"

    def report(self) -> ForwardReport:
        """Return the report on the forward pass so far."""
        used = 0 if self._store is None else self._store.used_bytes
        return ForwardReport(
            self._cut, self._computed, self._found, used, self.prefix_seconds, self.refused
        )

    def forget_others(self, loader: Iterable[Batch]) -> None:
        """Delete the features of examples that are no longer in the data.

        A loader whose passes cover only a part of its data has a method ``present()``, which yields the inputs of
        all examples. For other loaders, features of examples that did not occur are deleted once all examples seem
        to have occurred.
        """
        if self._store is None or not len(self._store):
            return
        present = getattr(loader, "present", None)
        if present is not None:
            self._store.keep_only({one for inputs in present() for one in sample_ids(inputs)})
        elif self._met_all():
            self._store.keep_only(self._met)

    def _met_all(self) -> bool:
        """Return whether every example seems to have occurred; equal examples count as one.

        With several passes, each may cover only a part of the data; then the number of examples read proves
        nothing.
        """
        one_pass = self._epochs <= 1 and self._meetings >= self._examples
        return one_pass or len(self._met) >= self._examples or self._since_new >= self._examples

    def close(self) -> None:
        """Release the store's memory or file."""
        if self._store is not None:
            self._store.close()

    def _has_rows(self, batch: Batch) -> bool:
        """Return whether each example has one row of the inputs, so that its features can be told apart."""
        inputs, examples = as_pair(batch)[0], batch_size(batch)
        try:
            rows = count_rows(inputs)
        except ModelError as error:
            self.refused = f"no elastic forward pass: {error}"
            return False
        listed = isinstance(inputs, (tuple, list)) and is_one_argument(inputs, examples)
        if rows == examples and not listed:
            return True
        self.refused = (
            f"no elastic forward pass: the first inputs of {examples} examples have {rows} rows"
        )
        return False

    def _leave(self) -> None:
        self._split = None

    def _proof_of(self, split: SplitModel, place: str, batch: Batch) -> _Proof | None:
        """Return the inputs for which the two parts give the whole model's outputs; checked once per cut."""
        if place not in self._proofs:
            inputs = as_pair(batch)[0]
            try:
                with untouched(self._model):
                    _, few = _on_few(split.check, inputs)
                rows = None if few else count_rows(inputs)
                self._proofs[place] = _Proof(sizes_of(inputs), rows)
            except ModelError as error:
                self._proofs[place] = None
                self.refused = f"no elastic forward pass: {error}"
        return self._proofs[place]

    def _open_store(self, split: SplitModel, cut: Cut, place: str, inputs: Any) -> None:
        if self._store is None:
            return
        first = place not in self._shapes
        prefix = fingerprint(split.prefix_modules, place, split.loose_tensors)
        try:
            if first:
                sample_ids(inputs)
                with untouched(self._model), torch.no_grad():
                    self._shapes[place], _ = _on_few(split.check_constant, inputs)
                self._layout = layout_of(inputs)
            self._store.prepare(prefix, self._shapes[place], self._examples)
            self._locked = cut.groups_above
        except (BudgetError, ModelError) as error:
            self._give_up(str(error))
            return
        if first and self._store.lasts:
            with untouched(self._model):
                self._drop_outdated(self._store, split, inputs)

    def _drop_outdated(self, store: FeatureStore, split: SplitModel, inputs: Any) -> None:
        """Delete the features that an earlier process kept if the model no longer computes the same ones.

        Features are looked up by a digest of the weights, which does not change if only the model's code changes.
        """
        known, stored = store.read(sample_ids(inputs))
        if not known:
            return
        now = split.features(take_examples(inputs, known[:_FEW]))
        stored = stored[:_FEW].to(now.device)
        error, greatest = ((each.float().abs().amax()) for each in (now - stored, now))
        tolerance = max(2 * FeatureCodec(self.options.precision, (1,)).tolerance, _rounding(now))
        if error <= tolerance * greatest:
            return
        _LOG.warning(
            "the features in %s differ from the model's present output at %r, although its weights are the same: "
            "its code has changed. They are computed anew", self.options.path, self._cut,
        )  # fmt: skip
        store.keep_only(())

    def _give_up(self, reason: str) -> None:
        self.refused = f"no feature store: {reason}"
        if self._store is not None:
            if self._store.lasts:
                # Logged, because every later round computes them again, and nobody reads the report on a device.
                _LOG.warning("features are not kept: %s", reason)
            self._store.close()
        self._store = None

    def _features(self, split: SplitModel, inputs: Any) -> Tensor:
        # Only for one layout of the inputs was it checked which tensors have one row per example.
        if self._store is None or layout_of(inputs) != self._layout:
            self._computed += (batch_shape((inputs, None)) or (1,))[0]
            return split.features(inputs)
        ids = sample_ids(inputs)
        self._meetings += len(ids)
        self._since_new = 0 if {*ids} - self._met else self._since_new + len(ids)
        self._met.update(ids)
        known, stored = self._store.read(ids)
        missing = sorted({*range(len(ids))}.difference(known))
        self._computed += len(missing)
        self._found += len(known)
        self._since_found = 0 if known else self._since_found + len(ids)
        if self._since_found > 2 * self._examples:
            self._give_up(
                "no example came back unchanged in two epochs: give the same examples without random augmentation"
            )
            return split.features(inputs)
        if not known:
            features = split.features(inputs)
            self._store.store(ids, features)
            if self._store.unfit and not len(self._store):
                self._give_up(
                    f"features of up to {float(features.abs().max()):.3g} change if stored as "
                    f"{self.options.precision}: keep them as fp32, or scale the inputs"
                )
            return features
        stored = stored.to(self._device)
        if not missing:
            return channels_last(stored)
        computed = split.features(take_examples(inputs, missing))
        self._store.store([ids[index] for index in missing], computed)
        whole = computed.new_empty(len(ids), *computed.shape[1:])
        whole[known] = stored
        whole[missing] = computed
        return channels_last(whole)


def _place(cut: Cut, transforms: Sequence[StepTransform]) -> str:
    """Return a key of the features at a cut, from its place and the transforms below; weights are not in it."""
    below = {cut.module, *(name for name, _ in cut.skipped)}
    keys = [part for transform in transforms for part in transform.feature_key(below)]
    return "/".join([cut.module, str(cut.at_input), *keys])


def _rounding(features: Tensor) -> float:
    """Return the relative difference that two ways of computing the same features may have."""
    return max(1e-3, 4 * torch.finfo(features.dtype).eps)


@dataclass(frozen=True)
class _Proof:
    """Kind of inputs for which the two parts of a model were checked to give the whole model's outputs.

    Attributes
    ----------
    sizes : tuple
        Sizes of an example, as `sizes_of` returns them.
    rows : int or None
        Number of examples, None if it does not matter.
    """

    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    rows: int | None

    def holds_for(self, inputs: Any) -> bool:
        """Return whether these inputs are of this kind."""
        return sizes_of(inputs) == self.sizes and self.rows in (None, count_rows(inputs))


def _on_few(check: Callable[[Any], _Said], inputs: Any) -> tuple[_Said, bool]:
    """Run a check on two examples, or on the whole batch if the model needs more.

    Return the check's result, and whether two examples sufficed. Every fit pays for the check: with kept features,
    checks on whole batches took as long as a round's steps.
    """
    try:
        if count_rows(inputs) > _FEW:
            return check(take_examples(inputs, slice(_FEW))), True
    except (ModelError, *_MISFITS):
        pass
    try:
        return check(inputs), False
    except ModelError:
        raise
    except _MISFITS as error:
        raise ModelError(f"the model cannot be run in two parts: {first_line(error)}") from error
