"""Passes over data above the fleet's cut: features at the cut are looked up, or computed and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import ExampleCounter
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.elastic_forward import ElasticForward
from fl_elastic.training.loader import first_batches, loader_size
from fl_elastic.training.options import TrainerOptions

if TYPE_CHECKING:
    from fl_elastic.closed_form.head_sums import HeadSums
    from fl_elastic.training.report import ForwardReport


@contextmanager
def passing_above_cut(
    model: nn.Module, loader: Iterable[Batch], graph: BackwardGraph, options: TrainerOptions
) -> Iterator[ElasticForward]:
    """Yield an `ElasticForward` that runs the frozen prefix in a pass over data, and looks up or stores features.

    Parameters
    ----------
    model : nn.Module
        Called on each batch inside ``forward.step(batch)``, where ``forward`` is the yielded object.
    loader : iterable of batches
        The data of the pass.
    graph : BackwardGraph
        The graph of a step of the model.
    options : TrainerOptions
        Has a cut, and says how the prefix runs.

    Raises
    ------
    PlanError
        If the model has no group at the cut.
    """
    assert options.forward is not None
    device = model_device(model)
    counter = ExampleCounter(options.count_examples)
    first = first_batches(loader, 1, device, counter)[0]
    above = graph.groups_above(options.part.cut)
    forward = ElasticForward(
        model, options.forward, epochs=1,
        examples=loader_size(loader, first, counter).examples,
        clock=clock_for(device, options.timing.clock), groups_above=above,
    )  # fmt: skip
    try:
        with forward.splitting(graph, above - 1, first):
            yield forward
        forward.forget_others(loader)
    finally:
        forward.close()


def head_sums_above_cut(
    model: nn.Module,
    loader: Iterable[Batch],
    graph: BackwardGraph | None,
    options: TrainerOptions,
    *,
    seconds: float,
    together: int = 1,
    loss_fn: LossFn | None = None,
) -> tuple[HeadSums, int | None, ForwardReport | None]:
    """Return the sums of round zero, the number of inputs in them (None for all), and a report on kept features.

    Parameters
    ----------
    model, loader, options
        As `passing_above_cut` takes them.
    graph : BackwardGraph, optional
        If left out, the whole model runs and no features are kept.
    seconds : float
        No batch is begun after this many seconds.
    together, loss_fn
        See `fl_elastic.training.head_pass.head_sums`.

    Raises
    ------
    TrainingError
        As `fl_elastic.training.head_pass.head_sums` does.
    PlanError
        If the model has no group at the cut.
    """
    # Imported here: a pass over test data does not need this module.
    from fl_elastic.training.head_pass import sums_and_inputs

    summed = partial(
        sums_and_inputs, model, loader, seconds=seconds, together=together, loss_fn=loss_fn
    )
    if graph is None:
        return *summed(), None
    with passing_above_cut(model, loader, graph, options) as forward:
        found = summed(running=forward.step)
    return *found, forward.report()
