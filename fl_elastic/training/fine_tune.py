"""Fine-tune on one device: choose where a closed-form head reads best, then train on kept features."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.closed_form.head import ClosedFormHead
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.loss_settings import example_counter
from fl_elastic.groups.model_state import ModelState
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import POLICIES, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.above_cut import passing_above_cut
from fl_elastic.training.costs import costs_for
from fl_elastic.training.cut_worth import cut_worth
from fl_elastic.training.loader import check_rereadable, first_batches, loader_size
from fl_elastic.training.model_head import put_head, solve_head
from fl_elastic.training.options import ForwardOptions, TrainablePart, TrainerOptions
from fl_elastic.training.read_out import readout_of
from fl_elastic.training.report import FitReport
from fl_elastic.training.trainer import ElasticTrainer
from fl_elastic.update.manifest import places_of

_LOG = logging.getLogger("fl_elastic")
_FEATURE_BYTES = 1 << 30
_EPOCHS = 2
# Batches for a first head, with which the cut is chosen: with fewer batches the choice is a matter of chance.
_ROUGH_BATCHES = 32


@dataclass(frozen=True)
class FineTuned:
    """The model that `fine_tune` trained, and what it chose and measured.

    Attributes
    ----------
    model : nn.Module
        The given model, or a `fl_elastic.readout.Readout` of it if its head reads elsewhere than at the
        last layer.
    reads : str
        Places that the head reads; empty for the last layer.
    cut : str
        The deepest tensor group that was trained; empty if none was.
    head_error, final_error : float
        Cross-validated mean squared error of the solved head, relative to predicting the mean: before and after
        training.
    report : FitReport or None
        Report of the training in between; None if nothing was trained.
    kept : bool
        Whether the model keeps what was trained. Training that made the error larger is undone; the model is then
        the pretrained one with a solved head.
    """

    model: nn.Module
    reads: str
    cut: str
    head_error: float
    final_error: float
    report: FitReport | None
    kept: bool


def fine_tune(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    loader: Iterable[Batch],
    *,
    read: str = "auto",
    epochs: int | None = None,
    cut: str = "",
    budget: Budget | None = None,
    policy: str | Policy = "elastic",
    feature_bytes: int = _FEATURE_BYTES,
    options: TrainerOptions | None = None,
) -> FineTuned:
    """Fine-tune a model in a fraction of the time that training all of it takes.

    A few hundred examples show where in the model a linear head reads best. The head is solved in closed form in
    one pass over the data, and the result is the model up to that place. If the best place is the last layer, the
    result is the model itself: the pass also keeps the features at a cut, the layers between cut and head are
    trained on these features, and the head is solved again. Norms keep their statistics. Training that makes the
    error on held-out examples larger is undone.

    Parameters
    ----------
    model : nn.Module
        Pretrained. It shares its tensors with the result; trained tensors are changed in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returning a torch optimiser. A learning rate made for a random head is too
        large.
    loader : iterable of batches
        Gives the same examples, without random augmentation, in any order that is not by class. Targets are
        classes, shape (N,), or numbers, shape (N, C).
    read : str
        Where the head reads: ``auto``, ``last`` for the last linear layer, or names of places such as
        ``features.6@grid4`` (`fl_elastic.readout.place`).
    epochs : int, optional
        Passes over the data for training. By default two for a head at the last layer, and none for a head that
        reads elsewhere, where training gains little for its time. Nothing is trained if there is no layer below the
        head, or none that is not frozen.
    cut : str
        The deepest tensor group or module that is trained. By default the one that gains most in the same time,
        estimated on two batches (`fl_elastic.training.cut_worth`).
    budget : Budget, optional
        Budget of the training between cut and head.
    policy : str or Policy
        Chooses the groups to train between cut and head.
    feature_bytes : int
        Bound of the kept features, which are held in a temporary file; others are computed again.
    options : TrainerOptions, optional
        Other settings; cut, kept head and forward pass in them are replaced.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, the loader can be read only once, or a
        loss is not finite. The model is then as before.
    PlanError
        If the model has no group or module named ``cut``.
    UpdateError
        If places cannot be compared, because all examples or all targets are equal.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> model = nn.Sequential(*body, nn.Linear(8, 2))
    >>> images = torch.randn(32, 1, 8, 8) + torch.arange(32).remainder(2).reshape(-1, 1, 1, 1)
    >>> data = [(images[i::4], torch.arange(32).remainder(2)[i::4]) for i in range(4)]
    >>> gently = lambda p: torch.optim.AdamW(p, 1e-3)
    >>> done = fine_tune(model, nn.functional.cross_entropy, gently, data, read="last", cut="2")
    >>> done.cut, done.report.steps, done.report.forward.found
    ('2', 8, 64)
    """
    policy = POLICIES.make(policy) if isinstance(policy, str) else policy
    check_rereadable(loader, "fine_tune reads it for each head and each epoch")
    model, _ = readout_of(model, loader, read, loss_fn=loss_fn)
    reads = places_of(ModelState.of(model).tensors)
    epochs = (0 if reads else _EPOCHS) if epochs is None else epochs
    if not epochs or not any(parameter.requires_grad for parameter in model.parameters()):
        return _head_alone(model, reads, loader, loss_fn)
    counter = example_counter(loss_fn)
    first = first_batches(loader, 2, model_device(model), counter)
    before = deepcopy(model.state_dict())
    try:
        with tempfile.TemporaryDirectory(prefix="fl-elastic-") as folder:
            options = replace(
                options or TrainerOptions(), part=TrainablePart(keep_statistics=True),
                forward=ForwardOptions(feature_bytes, path=Path(folder) / "features.db"),
            )  # fmt: skip
            profile = costs_for(
                policy, None, model, loss_fn, first[0],
                optimizer_fn=optimizer_fn, budget=budget or Budget(), options=options,
            )  # fmt: skip
            if not cut:
                _, head = solve_head(model, islice(loader, _ROUGH_BATCHES), loss_fn=loss_fn)
                rough = _keeping(options, model, profile, head)
                examples = loader_size(loader, first[0], counter).examples
                worth = cut_worth(
                    model, loss_fn, first, profile, rough, examples, optimizer_fn=optimizer_fn
                )
                if not worth:
                    # The head reads the input, or its random features, or is all of the model.
                    return _head_alone(model, reads, loader, loss_fn)
                cut = max(worth, key=worth.__getitem__)
            options = replace(options, part=replace(options.part, cut=cut))
            start, head = _solve_above_cut(model, loss_fn, loader, profile, options)
            options = _keeping(options, model, profile, head)
            trainer = ElasticTrainer(
                model, loss_fn, optimizer_fn,
                budget=budget or Budget(), policy=policy, profile=profile, options=options,
            )  # fmt: skip
            report = trainer.fit(loader, epochs=epochs)
            end, _ = _solve_above_cut(model, loss_fn, loader, profile, options)
    except BaseException:
        model.load_state_dict(before)
        raise
    kept = end.error <= start.error
    if not kept:
        _LOG.warning(
            "training above %s made the error on held-out examples larger (%.3g, before %.3g) and was undone. "
            "Use a smaller learning rate: one that suits a random head ruins the layers below a solved one",
            cut, end.error, start.error,
        )  # fmt: skip
        model.load_state_dict(before)
        put_head(model, start, head)
    return FineTuned(model, reads, cut, start.error, end.error, report, kept)


def _head_alone(
    model: nn.Module, reads: str, loader: Iterable[Batch], loss_fn: LossFn
) -> FineTuned:
    """Solve for the head over all data, and train nothing."""
    solved, _ = solve_head(model, loader, loss_fn=loss_fn)
    return FineTuned(model, reads, "", solved.error, solved.error, None, True)


def _keeping(
    options: TrainerOptions, model: nn.Module, profile: CostProfile, head: str
) -> TrainerOptions:
    """Return options under which the solved head is not trained; unchanged options if it is frozen already."""
    weight = ModelState.of(model).parameter_of(head)
    if not model.get_parameter(weight).requires_grad:
        return options
    group = profile.graph.group_of(weight)
    return replace(options, part=replace(options.part, kept_head=group))


def _solve_above_cut(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Batch],
    profile: CostProfile,
    options: TrainerOptions,
) -> tuple[ClosedFormHead, str]:
    with passing_above_cut(model, loader, profile.graph, options) as forward:
        return solve_head(model, loader, forward.step, loss_fn)
