"""Importance from training steps: equal to a probe of the same batches, and only of what was trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_model
from small_models import (
    adam,
    chain,
    conv_net,
    elastic_trainer,
    flat_profile,
    images,
    loss_fn,
    sgd,
    trainer_of,
    vectors,
)  # fmt: skip
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fl_elastic import Budget
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import compute_loss
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning.importance import Probe
from fl_elastic.planning.importance.elastic import ElasticImportance
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.training.step import StepImportance, _along


def probed(model: nn.Module, batches: list[Batch], optimizer_fn: OptimizerFn) -> dict[str, float]:
    """Return the score of a probe on the first two batches, by a model as it is now."""
    groups = flat_profile(model, batches[0], optimizer_fn).graph.groups
    found = ElasticImportance().score(
        Probe(
            model=model,
            loss_fn=loss_fn,
            groups=groups,
            batches=batches[:2],
            shadow_optimizer=optimizer_fn,
            generator=np.random.default_rng(0),
        )
    )
    return dict(zip((group.name for group in groups), found.tolist(), strict=True))


@pytest.mark.parametrize("optimizer_fn", [sgd, adam])
@pytest.mark.parametrize(
    ("make", "batches"),
    [(chain, vectors(5)), (conv_net, images(5)), (lambda: conv_net("group"), images(5))],
    ids=["chain", "batch norm", "group norm"],
)
def test_two_steps_tell_what_a_probe_of_their_batches_tells(
    make: Callable[[], nn.Module], batches: list[Batch], optimizer_fn: OptimizerFn
) -> None:
    model = make()
    expected = probed(model, batches, optimizer_fn)
    trainer = ElasticTrainer(
        model, loss_fn, optimizer_fn, budget=Budget(),
        profile=flat_profile(model, batches[0], optimizer_fn),
        options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(batches)
    assert report.importance == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_the_pull_towards_the_fleet_is_no_importance() -> None:
    batches, model = vectors(3), chain()
    expected = probed(model, batches, sgd)
    options = TrainerOptions(proximal=5.0, timing=Timing(closed_loop=False))
    profile = flat_profile(model, batches[0])
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), profile=profile, options=options)
    assert trainer.fit(batches).importance == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_only_what_is_trained_is_read() -> None:
    batches = vectors(4)
    trainer = trainer_of(chain(), batches[0], ["6", "2"])
    assert set(trainer.fit(batches).importance) == {"6", "2"}


def test_one_step_tells_nothing() -> None:
    batches = vectors(1)
    trainer = elastic_trainer(chain(), batches[0], Budget())
    assert trainer.fit(batches).importance == {}
    assert trainer.state.scores == []


def test_a_group_is_read_once_in_the_second_step_that_uses_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = flat_profile(model, (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))).graph.groups
    before = {id(p): p.detach().numpy().copy() for p in model.parameters()}
    seen = StepImportance(model, lambda parameter: before[id(parameter)], groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    head = [index for index, group in enumerate(groups) if group.name == "1"]
    seen.observe([0, 1])
    assert np.isnan(seen.scores()).all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5
    model[0].weight.grad = None
    model[0].bias.grad = None
    seen.observe([0, 1])
    found = seen.scores()
    # Six weights moved by half a gradient of one.
    assert found[head] == pytest.approx([3.0]) and np.isnan(np.delete(found, head)).all()
    seen.observe(head)
    assert np.isnan(seen.scores()).all()


def test_a_product_that_overflows_is_no_score_and_spoils_none() -> None:
    model = nn.Linear(2, 2)
    batch = (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    groups = flat_profile(model, batch).graph.groups
    before = {id(p): p.detach().numpy().copy() for p in model.parameters()}
    seen = StepImportance(model, lambda parameter: before[id(parameter)], groups)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 1e30), torch.ones(2)
    seen.observe([0])
    with torch.no_grad():
        model.weight -= 1e30
        model.bias -= 0.5
    seen.observe([0])
    assert seen.scores() == pytest.approx([1.0])


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_random_models_tell_what_plain_steps_tell(seed: int) -> None:
    drawn = random_model(seed)
    model, batches = drawn.model, drawn.batches[:2]
    profile = flat_profile(model, batches[0])
    plain = copy.deepcopy(model)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(), profile=profile,
        options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    torch.manual_seed(seed)
    told = trainer.fit(batches).importance
    torch.manual_seed(seed)
    expected = by_plain_steps(plain, batches)
    for group in profile.graph.groups:
        read = [expected[name] for name in group.parameters if name in expected]
        assert (group.name in told) is bool(read)
        if read:
            scale = max(map(abs, read))
            assert told[group.name] == pytest.approx(sum(read), rel=1e-4, abs=1e-4 * scale + 1e-9)


def by_plain_steps(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """Return minus gradient times movement by name, from torch's own loop; without what only one step used."""
    model.train()
    parameters = dict(model.named_parameters())
    optimizer = sgd([each for each in parameters.values() if each.requires_grad])
    before = {name: each.detach().clone() for name, each in parameters.items()}
    used = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        compute_loss(model, loss_fn, batch).backward()  # type: ignore[no-untyped-call]
        used.append({name for name, each in parameters.items() if each.grad is not None})
        if len(used) == 2:
            break
        optimizer.step()
    found = dict.fromkeys(parameters.keys() - used[0] - used[1], 0.0)
    for name in used[0] & used[1]:
        gradient = parameters[name].grad
        assert gradient is not None
        found[name] = -float((gradient * (parameters[name].detach() - before[name])).sum())
    return found


@pytest.mark.parametrize("shape", [(3000, 1000), (1, 2_000_000), (64, 40, 33, 33), (5,)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_copy_of_a_big_layer_is_made_and_the_sum_is_that_of_the_whole(
    shape: tuple[int, ...], channels_last: bool
) -> None:
    """Fresh memory as large as a layer takes longer than the step that it tells of."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not func.is_view:
                made.append(found.numel())
            return found

    layout = torch.channels_last if channels_last and len(shape) == 4 else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    gradient, now, before = (torch.randn(shape, generator=generator) for _ in range(3))
    gradient, now = gradient.to(memory_format=layout), now.to(memory_format=layout)
    expected = float((gradient.double() * (now.double() - before.double())).sum())
    scale = float((gradient.double() * (now.double() - before.double())).square().sum().sqrt())
    with Watch():
        found = _along(gradient, now, before)
    assert abs(found - expected) < 1e-3 * scale
    assert max(made) <= max(1 << 18, now[:1].numel())


def test_a_single_number_and_nothing_at_all_have_a_worth_too() -> None:
    """Scales without dimensions and empty layers are parameters as well."""
    assert _along(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1.5)) == 1.5
    assert _along(*[torch.zeros(0, 3)] * 3) == 0.0
