"""Hold a model of the zoo to what a plain loop makes of the same plans, or to a reason for refusing it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from fit_checks import Breaks, Surroundings, far_apart, trained_by_plans
from subject import Case, Subject
from torch import nn
from trainer_settings import free_probes

import fl_elastic
from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError
from fl_elastic.groups import Mode
from fl_elastic.groups.untouched import RngState
from fl_elastic.profiling import estimate_profile
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.update import Manifest

BUDGETS = ("speedup elastic", "speedup last_k", "memory elastic")
# Lean layers of a plan under a memory limit round differently.
_PLAIN, _LEAN = 0.0, 5e-4
_EPOCHS = 2
# Where the head alone takes more than the usual share of what a full step keeps.
_LARGE_HEADS = {
    "gpt2_language": 0.7,
    "opt_layer_drop": 0.7,
    "mamba_state_space": 0.9,
    "bart_layer_drop": 0.8,
    "prefix_on_gpt2": 1.05,
    "prefix_projected_on_gpt2": 1.05,
    "prompt_on_llama": 1.05,
}
_SEEN = 5
# What moves in the forward pass is not to stay at home.
_WHOLE = {"target_that_follows"}


def built(case: Case) -> Subject:
    """Return the model of a row with the weights of one seed, as one that has seen its batches.

    Models of transformers add hooks of their own when they run first, and norms begin far from what they see.
    """
    _seed()
    subject = case.make()
    with torch.no_grad():
        for batch in copy.deepcopy(subject.batches * _SEEN):
            subject.loss_of(subject.model, batch)
    return subject


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return what a stale gradient or state would move."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01)


def gently(parameters: Any) -> torch.optim.Optimizer:
    """Return what does not tear the layers below a solved head."""
    return torch.optim.SGD(parameters, lr=1e-5)


def trained(case: Case, asked: str) -> tuple[list[str], str]:
    """Train a row under a budget by a policy; return what is wrong, and the reason if it was refused."""
    subject = built(case)
    kind, policy = asked.split()
    with pytest.MonkeyPatch.context() as patched:
        free_probes(patched)
        return _trained(case, subject, kind, policy)


def _trained(case: Case, subject: Subject, kind: str, policy: str) -> tuple[list[str], str]:
    model = subject.model
    _seed()
    rng, around, start = RngState.now(), Surroundings(model), _state(model)
    options = TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False))
    try:
        profile = estimate_profile(model, subject.loss_fn, subject.batches[0], optimizer_fn=sgd)
        found = [f"measuring changed {what}" for what in around.changed()]
        found += [f"measuring moved {name}" for name in _moved(model, start)]
        found += ["measuring drew numbers"] if rng.moved() else []
        everything = step_memory(profile, [Mode.FULL] * len(profile)).total
        share = _LARGE_HEADS.get(case.name, 0.6)
        budget = Budget(memory=share * everything) if kind == "memory" else Budget(speedup=1.7)
        trainer = ElasticTrainer(
            model, subject.loss_fn, sgd, budget=budget, policy=policy, options=options,
            profile=None if kind == "memory" else profile,
            manifest=Manifest.of(model, whole=True) if case.name in _WHOLE else None,
        )  # fmt: skip
        twin = copy.deepcopy(model)
        report = trainer.fit(Breaks(subject.batches), _EPOCHS)
    except ElasticError as error:
        return _left_behind(model, start, around, error), str(error)
    after = RngState.now()
    found += [f"fit changed {what}" for what in around.changed() if what not in _GENERATORS]
    rng.put_back()
    reference = trained_by_plans(
        twin, subject.loss_fn, sgd, report.plans, report.steps, subject.batches,
        loss_of=subject.loss_of,
    )  # fmt: skip
    found += ["fit drew other numbers than its steps"] if after.moved() else []
    lean = any(plan.lean for _, plan in report.plans)
    moved = far_apart(_state(model), dict(_state(twin)), _LEAN if lean else _PLAIN, set())
    found += [f"{name} differs by {gap:.2g} ({lean=})" for name, gap in moved.items()]
    if not reference.steps:
        found.append("nothing was trained")
    update = trainer.update()
    for name, delta in update.deltas.items():
        end = start[name].numpy() + delta
        if not np.allclose(end, model.state_dict()[name].numpy(), 1e-5, 1e-6):
            found.append(f"delta of {name}")
    still = {name for name in _moved(model, start) if name in trainer.manifest.index}
    whole = {n for n, t in _state(model).items() if not t.is_floating_point()}
    found += [f"{name} moved but does not travel" for name in still - {*update.deltas, *whole}]
    return found, ""


def tuned(case: Case) -> tuple[list[str], str]:
    """Fine-tune a row on its batches; return what is wrong, and the reason if it was refused."""
    subject = built(case)
    model = subject.model
    _seed()
    around, start = Surroundings(model), _state(model)
    try:
        done = fl_elastic.fine_tune(
            model, subject.loss_fn, gently, subject.batches, epochs=1, read="last"
        )
    except ElasticError as error:
        return _left_behind(model, start, around, error), str(error)
    found = [f"tuning changed {what}" for what in around.changed() if what not in _GENERATORS]
    finite = all(bool(torch.isfinite(each).all()) for each in _state(model).values())
    if not (finite and np.isfinite([done.head_error, done.final_error]).all()):
        found.append("tuning left numbers that are not finite")
    if done.kept and done.final_error > done.head_error:
        found.append("a larger error was kept")
    return found, ""


# Where a model draws, its training draws as well.
_GENERATORS = {"python", "numpy"}


def _left_behind(
    model: nn.Module, start: Any, around: Surroundings, error: ElasticError
) -> list[str]:
    """Return what a refusal must not leave behind."""
    lines = str(error).splitlines()
    found = [f"refused in {len(lines)} lines"] if len(lines) != 1 else []
    found += [f"a refusal moved {name}" for name in _moved(model, start)]
    return found + [
        f"a refusal changed {what}" for what in around.changed() if what not in _GENERATORS
    ]


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of weights and of all buffers, also of those that are not kept in files."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {
        n: each.detach().clone() for n, each in tensors.items() if isinstance(each, torch.Tensor)
    }


def _moved(model: nn.Module, start: dict[str, torch.Tensor]) -> list[str]:
    now = _state(model)
    return [name for name, value in now.items() if not torch.equal(value, start[name])]
