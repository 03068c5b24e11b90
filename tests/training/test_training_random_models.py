"""Random models under random policies and budgets train as the slow reference does, and leave no trace."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fit_checks import Breaks, Surroundings, far_apart, same, trained_by_plans
from kept_bytes import kept_bytes
from random_models import RandomModel, random_model
from slow_ones import slow_unless
from small_models import adam, loss_fn, sgd
from torch import nn
from trainer_settings import free_probes, settings_of

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.profiling import estimate_profile
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, ForwardOptions
from fl_elastic.training.apply_plan import plan_applied
from fl_elastic.training.step import TrainingStep

TRIED = (
    "elastic", "full", "head", "last_k", "random", "joint", "bias", "tinytrain", "gradient_filter",
    "sparse_update",
)  # fmt: skip
BUDGETS = ("none", "speedup 1.5", "speedup 3", "memory 1/2", "memory 1/4", "uplink", "deadline")
# Plain plans are bit for bit those of torch. Lean layers round differently, as do the folded norms of an elastic
# forward pass, and a norm over few, nearly equal values multiplies that by up to 300, its epsilon's inverse root.
PLAIN, LEAN, FORWARD = 0.0, 5e-4, 1e-3
FUZZED = int(os.environ.get("FL_ELASTIC_FUZZ", "200"))
FIRST = int(os.environ.get("FL_ELASTIC_FUZZ_FIRST", "1000"))


def budget_of(name: str, profile: Any) -> Budget:
    kind, _, amount = name.partition(" ")
    everything = [Mode.FULL] * len(profile)
    if kind == "speedup":
        return Budget(speedup=float(amount))
    if kind == "memory":
        share = 1 / float(amount.partition("/")[2])
        return Budget(memory=share * step_memory(profile, everything).total)
    if kind == "uplink":
        return Budget(uplink=0.5 * float(profile.parameter_bytes.sum()))
    if kind == "deadline":
        return Budget(deadline=5 * profile.full_step_seconds)
    return Budget()


@contextmanager
def drawn_times(seed: int) -> Iterator[None]:
    """Let every time that is measured inside the block be a draw: the plans are not those of this machine.

    Layers cost anything between nothing and hundreds of others, in any order.
    """
    generator, now = np.random.default_rng(seed), 0.0

    def clock() -> float:
        nonlocal now
        now += generator.lognormal(-9.0, 1.5)
        return now

    with ExitStack() as stack:
        for module in ("profiling.estimate", "training.costs", "training.trainer"):
            patch = mock.patch(f"fl_elastic.{module}.clock_for", lambda *_: clock)
            stack.enter_context(patch)
        yield


def problems_of(seed: int, policy: str, budget_name: str, forward: bool) -> list[str] | None:
    """Return what is wrong with one fit; None if the plan was refused."""
    with drawn_times(seed), pytest.MonkeyPatch.context() as patched:
        free_probes(patched)
        return _problems_of(seed, policy, budget_name, forward)


def _problems_of(seed: int, policy: str, budget_name: str, forward: bool) -> list[str] | None:
    drawn = random_model(seed)
    model, batches = drawn.model, drawn.batches
    torch.manual_seed(seed)
    generator = torch.get_rng_state()
    around = Surroundings(model)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    plain = sgd if forward or budget_name.startswith("memory") else (adam if seed % 2 else sgd)
    if policy in ("joint", "tinytrain", "gradient_filter", "sparse_update"):
        plain = sgd
    profile = estimate_profile(model, loss_fn, batches[0], optimizer_fn=plain)
    found = [f"measuring changed {what}" for what in around.changed()]
    found += [
        f"measuring moved {n}" for n, b in model.named_buffers() if not torch.equal(b, buffers[n])
    ]
    if not torch.equal(generator, torch.get_rng_state()):
        found.append("measuring drew numbers")
    settings = settings_of(
        closed_loop=False, probe_every=3, below_cosine=2.0 if seed % 3 else 0.8,
        full_update_every=[0, 2][seed % 2], seed=seed, forward=ForwardOptions(
            feature_bytes=1 << 20 if seed % 2 else 0, precision="fp32"
        ) if forward else None,
    )  # fmt: skip
    budget = budget_of(budget_name, profile)
    given = None if seed % 2 and budget_name != "deadline" else profile
    trainer = ElasticTrainer(
        model, loss_fn, plain, budget=budget, policy=policy, profile=given, **settings
    )
    twin = copy.deepcopy(model)
    start = {n: t.detach().clone() for n, t in model.state_dict().items()}
    loader, epochs = Breaks(batches), 2
    modes: list[dict[str, bool]] = []
    try:
        report = trainer.fit(loader, epochs) if not forward else _watched(trainer, loader, modes)
    except (PlanError, BudgetError) as error:
        lines = str(error).splitlines()
        found += [] if len(lines) == 1 else [f"refused in {len(lines)} lines"]
        found += [
            f"a refused fit moved {n}" for n in far_apart(model.state_dict(), start, 0, set())
        ]
        found += [f"a refused fit changed {what}" for what in around.changed()]
        return found or None
    found += [f"fit changed {what}" for what in around.changed()]
    after = torch.get_rng_state()
    plans = report.plans
    random_here = drawn.is_random
    odd = {
        name
        for _, plan in plans
        for group, mode in zip(plan.groups, plan.modes, strict=True)
        if mode.kind in ("channels", "filtered")
        for name in mode.trains(group)
    }
    lean = any(plan.lean for _, plan in plans)
    if forward:
        # What the elastic forward pass puts into eval mode, beyond norms, must be frozen.
        for step, seen in enumerate(modes):
            plan = [p for at, p in plans if at <= step][-1]
            trained = set(plan.trained_parameters)
            for name, module in model.named_modules():
                if not seen.get(name, True) and any(
                    f"{name}.{each}" in trained for each, _ in module.named_parameters()
                ):
                    found.append(f"{name} trains in eval mode")
    comparable = not (forward and (random_here or len(modes) != report.steps))
    if forward and not comparable and not random_here:
        found.append(f"{len(modes)} modes for {report.steps} steps")
    trained = {name for _, plan in plans for name in plan.trained_parameters}
    if comparable:
        torch.set_rng_state(generator)
        reference = trained_by_plans(
            twin, loss_fn, plain, plans, report.steps, batches, modes if forward else ()
        )
        if not torch.equal(after, torch.get_rng_state()):
            found.append("fit drew other numbers than its steps")
        tolerance = FORWARD if forward else LEAN if lean else PLAIN
        if odd:
            known = set(_every_name(model, dict.fromkeys(trained, 1)))
            moved = far_apart(model.state_dict(), start, 0, known | set(buffers))
        else:
            moved = far_apart(model.state_dict(), reference.weights, tolerance, set())
        found += [
            f"{n} differs by {gap:.2g} (plain {lean=} {forward=})" for n, gap in moved.items()
        ]
        update = trainer.update()
        counted = {n: s for n, s in update.steps.items()}
        expected = replace(
            reference,
            steps=_every_name(twin, reference.steps),
            moved=_every_name(twin, reference.moved),
        )
        # Where some weights differ, content may go another way.
        wrong = [] if odd else expected.miscounted(counted)
        found += [f"steps of {n}: {expected.steps.get(n)}, trainer {counted.get(n)}" for n in wrong]
        found += [
            f"delta of {n}"
            for n, d in update.deltas.items()
            if not np.allclose(start[n].numpy() + d, model.state_dict()[n].numpy(), 1e-5, 1e-6)
        ]
        if set(update.deltas) != set(counted):
            found.append("deltas are not those of the steps")
        still = far_apart(model.state_dict(), start, 0, {*update.deltas, *_whole_numbers(model)})
        found += [f"{n} moved but does not travel" for n in still]
    found += _after_failure(trainer, model, loader)
    found += [f"failure changed {what}" for what in around.changed()]
    if not forward:
        found += _memory(drawn, profile, report.plan, generator)
    return found


def _watched(trainer: ElasticTrainer, loader: Any, modes: list[dict[str, bool]]) -> Any:
    """Fit and note in which modes each step's loss was computed."""
    take = TrainingStep.take

    def noting(self: TrainingStep, batch: Any) -> float:
        modes.append({name: m.training for name, m in self.model.named_modules()})
        return take(self, batch)

    with mock.patch.object(TrainingStep, "take", noting):
        return trainer.fit(loader, 2)


def _whole_numbers(model: nn.Module) -> set[str]:
    return {n for n, t in model.state_dict().items() if not t.is_floating_point()}


def _every_name(model: nn.Module, steps: dict[str, int]) -> dict[str, int]:
    known = {}
    for kind in (model.named_parameters, model.named_buffers):
        first = {id(t): n for n, t in kind()}
        for name, tensor in kind(remove_duplicate=False):
            if steps.get(first[id(tensor)]):
                known[name] = steps[first[id(tensor)]]
    return known


def _after_failure(trainer: ElasticTrainer, model: nn.Module, loader: Breaks) -> list[str]:
    assert trainer.optimizer is not None
    start = {n: t.detach().clone() for n, t in model.state_dict().items()}
    extra = {n: b.clone() for n, b in model.named_buffers()}
    state = copy.deepcopy(trainer.optimizer.state_dict())
    loader.armed = True
    try:
        trainer.fit(loader, 2)
        return []  # The budget ended before the failure.
    except OSError:
        pass
    except (BudgetError, PlanError):
        return []
    finally:
        loader.armed = False
    found = [f"failure moved {n}" for n in far_apart(model.state_dict(), start, 0, set())]
    found += [
        f"failure moved {n}" for n, b in model.named_buffers() if not torch.equal(b, extra[n])
    ]
    now = trainer.optimizer.state_dict()
    if not same(now, state):
        found.append("failure moved the optimiser")
    return found


def _memory(drawn: RandomModel, profile: Any, plan: Any, generated: torch.Tensor) -> list[str]:
    model, batch, found = drawn.model, drawn.batches[0], []
    if profile.graph.unused:
        # Frozen norms run in eval mode, and other activations may go another way.
        return []
    plans = [
        plan,
        POLICIES.make("bias").plan(
            PlanRequest(profile, Budget(memory=1e12), np.ones(len(profile)))
        ),
    ]
    for lean in (True, False):
        budget = Budget(memory=1e12) if lean else Budget()
        request = PlanRequest(profile, budget, np.ones(len(profile)))
        generator = np.random.default_rng(len(profile))
        masks = [np.ones(len(profile), dtype=bool), request.head_mask()]
        masks += [request.head_mask() | (generator.random(len(profile)) < 0.5) for _ in range(2)]
        plans += [request.plan_of_mask("test", mask) for mask in masks]
    for each in plans:
        memory = each.memory(profile)
        predicted = memory.activations - memory.largest_block
        torch.set_rng_state(generated)
        with untouched(model), plan_applied(each, model):
            loss: Any = None

            def run() -> Any:
                nonlocal loss
                loss = compute_loss(model, loss_fn, batch)
                return loss

            kept = kept_bytes(run, besides=model)
        # Torch's copy of what is written in place through a view counts in full, although a lean layer keeps bits.
        views = any(
            node.name.endswith(("CopySlices", "AsStridedBackward0")) for node in profile.graph.nodes
        )
        # Filtered convolutions in a row keep patches of what lies between them; plans count each layer alone.
        chains = sum(mode.filters_input for mode in each.modes) > 1
        if kept - predicted > 0.05 * kept + 1200 or (
            predicted - kept > 0.05 * kept + 1200 and not (views or chains)
        ):
            found.append(
                f"memory of {[str(m) for m in each.modes]} {each.transforms}: predicted "
                f"{predicted:.0f}, kept {kept}"
            )
    return found


def cases_of(seed: int, count: int) -> list[tuple[str, str, bool]]:
    generator = random.Random(seed)
    return [
        (generator.choice(TRIED), generator.choice(BUDGETS), generator.random() < 0.3)
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 10, range(20)))
def test_a_random_model_trains_as_the_reference_does(seed: int) -> None:
    for policy, budget, forward in cases_of(seed, 2):
        found = problems_of(seed, policy, budget, forward)
        assert not found, (seed, policy, budget, forward, found)


@pytest.mark.slow
def test_many_random_models_train_as_the_reference_does() -> None:
    wrong = []
    for seed in range(FIRST, FIRST + FUZZED):
        for policy, budget, forward in cases_of(seed, 4):
            found = problems_of(seed, policy, budget, forward)
            wrong += [(seed, policy, budget, forward, found)] if found else []
    assert not wrong
