"""Whatever the CPU does, an accelerator does: a model there, batches there or on the CPU, and the same result."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerator import CPU, DEVICE
from plain_loop import plain_steps
from slow_ones import slow_unless
from small_federation import EXAMPLES, arrays_of, as_weights, local_data, plain_sgd, quiet, run
from small_models import Batch, images, loss_fn, sgd
from torch import nn
from vision_transformers import of_torchvision, small_images

from fl_elastic import Budget, ElasticTrainer, TrainerOptions, fine_tune, forget
from fl_elastic.errors import TrainingError
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.groups.batch import map_tensors
from fl_elastic.planning import POLICIES, Plan
from fl_elastic.profiling import estimate_profile, profile_model
from fl_elastic.training import (
    ForwardOptions,
    Timing,
    TrainablePart,
    apply_plan,
    evaluate,
    plan_for,
)
from fl_elastic.training.model_head import solve_head
from fl_elastic.update.manifest import places_of

# Where there is none the tests run on the CPU, once, and compare it with itself.
pytestmark = [] if DEVICE != CPU else [pytest.mark.slow]
PLACES = [pytest.param((DEVICE, CPU), id="batches on the CPU")]
if DEVICE != CPU:
    PLACES.append(pytest.param((DEVICE, DEVICE), id="batches beside the model"))
Place = tuple[torch.device, torch.device]


@pytest.fixture(autouse=True)
def _exact() -> Any:
    """Let an accelerator multiply in fp32, as the CPU does."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def data(place: torch.device, count: int = 4, seed: int = 0) -> list[Batch]:
    return moved(images(count, seed=seed), place)


def moved(batches: list[Batch], place: torch.device) -> list[Batch]:
    return [map_tensors(lambda tensor: tensor.to(place), each) for each in batches]


def state(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def alike(one: dict[str, Any], other: dict[str, Any], rounding: float = 2e-4) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=rounding, atol=rounding, err_msg=name)


def stays(model: nn.Module) -> bool:
    return {each.device.type for each in (*model.parameters(), *model.buffers())} == {DEVICE.type}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_trains_there(policy: str, places: Place) -> None:
    here, there = places
    tokens = policy in ("bsr", "e_vit")
    model = (of_torchvision() if tokens else net()).to(here)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy=policy,
        options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    before = state(model)
    batches = moved(small_images(4) if tokens else images(4), there)
    for _ in range(2):
        report = trainer.fit(batches, epochs=2)
    assert report.steps > 0 and stays(model)
    update = trainer.update()
    assert update.deltas
    changed = {
        name for name, value in state(model).items() if not np.array_equal(value, before[name])
    }
    assert set(update.deltas) <= changed


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("policy", ["full", "elastic", "tinytrain", "gradient_filter", "joint"])
def test_a_plan_trains_the_same_weights_there(policy: str, lean: bool) -> None:
    model, batches = net(), data(CPU)
    whole = sum(4.0 * each.numel() for each in model.parameters())
    budget = Budget(speedup=1.5, memory=None if not lean else 40 * whole)
    plan = plan_for(model, loss_fn, batches, budget=budget, policy=policy)
    ended = {}
    for device in (CPU, DEVICE):
        one = net().to(device)
        own_loop(one, plan, data(device))
        ended[device.type] = state(one)
    alike(ended["cpu"], ended[DEVICE.type])


def own_loop(model: nn.Module, plan: Plan, batches: list[Batch]) -> None:
    optimizer = sgd(model.parameters())
    with apply_plan(model, plan, optimizer):
        plain_steps(model, optimizer, batches, loss_fn)


@pytest.mark.parametrize("memory", [3e4, 1e5, 1e6])
def test_a_memory_budget_holds_there(memory: float) -> None:
    ended = {}
    for device in (CPU, DEVICE):
        model = net().to(device)
        trainer = ElasticTrainer(
            model, loss_fn, sgd, budget=Budget(memory=memory), policy="last_k",
            options=TrainerOptions(timing=Timing(closed_loop=False)),
        )  # fmt: skip
        assert trainer.fit(data(CPU)).steps == 4
        ended[device.type] = state(model)
    alike(ended["cpu"], ended[DEVICE.type])


def test_costs_are_measured_there() -> None:
    model = net().to(DEVICE)
    for profile in (
        profile_model(model, loss_fn, data(CPU)[0], optimizer_fn=sgd),
        estimate_profile(model, loss_fn, data(CPU)[0], optimizer_fn=sgd),
    ):
        assert profile.key.device.startswith(DEVICE.type)
        assert profile.full_step_seconds > 0 and np.isfinite(profile.update_seconds).all()


def test_a_class_without_an_output_is_refused_and_the_process_goes_on() -> None:
    model = net().to(DEVICE)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    before = state(model)
    for wrong in (3, -1):
        unknown = (torch.randn(6, 3, 8, 8), torch.full((6,), wrong))
        with pytest.raises(TrainingError, match=f"Target {wrong} is out of bounds"):
            trainer.fit([*data(CPU), unknown])
        alike(before, state(model), 0.0)
    left_out = (torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, -100, -100, 0]))
    assert trainer.fit([*data(CPU), left_out]).steps == 5


@pytest.mark.parametrize("keeps", [0, 1 << 20])
@pytest.mark.parametrize("places", PLACES)
def test_above_a_cut_the_weights_are_those_of_plain_steps_there(
    places: Place, keeps: int, tmp_path: Path
) -> None:
    here, there = places
    client = ElasticClient(
        net().to(here), data(there), data(there, 1, seed=9), budget=Budget(), policy="full",
        loss_fn=loss_fn, optimizer_fn=plain_sgd, state_dir=tmp_path,
        options=TrainerOptions(
            forward=ForwardOptions(keeps), timing=Timing(closed_loop=False), part=TrainablePart("6")
        ),
    )  # fmt: skip
    found = []
    for _ in range(2):
        expected = deepcopy(client.model)
        client.fit(client.get_parameters({}), {})
        assert client.report is not None and client.report.forward is not None
        # How many passes take as long as one without a cut depends on how fast the machine is just now.
        steps_above(expected, data(here), client.report.steps)
        alike(state(client.model), state(expected), 1e-5)
        found.append(client.report.forward.found)
    assert (found[-1] > 0) == (keeps > 0)


def steps_above(model: nn.Module, batches: list[Batch], steps: int) -> None:
    """Train the last convolution and the head, as anybody would."""
    trained = [each for n, each in model.named_parameters() if n.startswith(("6.", "10."))]
    optimizer = plain_sgd(trained)
    model.train()
    model.get_submodule("1").eval()
    for step in range(steps):
        x, y = batches[step % len(batches)]
        model.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("places", PLACES)
def test_a_head_is_solved_for_there(places: Place) -> None:
    here, there = places
    plain, model = net(), net().to(here)
    solve_head(plain, data(CPU))
    solve_head(model, data(there))
    alike(state(plain), state(model), 1e-3)


@pytest.mark.parametrize("places", PLACES)
def test_a_head_reads_inside_of_a_model_there(places: Place) -> None:
    here, there = places
    plain = fine_tune(net(), loss_fn, sgd, data(CPU), read="2@grid2").model
    done = fine_tune(net().to(here), loss_fn, sgd, data(there), read="2@grid2")
    assert places_of(done.model.state_dict()) == done.reads == "2@grid2" and stays(done.model)
    alike(state(plain), state(done.model), 1e-3)


@pytest.mark.parametrize("places", PLACES)
def test_fine_tuning_forgetting_and_testing_there(places: Place) -> None:
    here, there = places
    model = net().to(here)
    done = fine_tune(model, loss_fn, lambda p: torch.optim.AdamW(p, 1e-4), data(there), read="last")
    assert done.report.steps == 8 and stays(model)
    loss = evaluate(model, loss_fn, data(there)).loss
    plain = deepcopy(model).cpu()
    expected = evaluate(plain, loss_fn, data(CPU)).loss
    assert loss == pytest.approx(expected, rel=1e-3)
    forget(model, loss_fn, data(there, 1), data(there))
    forget(plain, loss_fn, data(CPU, 1), data(CPU))
    alike(state(plain), state(model), 1e-3)


@pytest.mark.parametrize("codec", slow_unless("int8".__eq__, ["fp32", "fp16", "int8"]))
@pytest.mark.parametrize("terms", [{}, {"cut": "moving", "read": "last"}])
def test_a_federation_there(terms: dict[str, Any], codec: str, tmp_path: Path) -> None:
    def client_of(node: int) -> ElasticClient:
        return ElasticClient(
            net().to(DEVICE), local_data(node), images(2, seed=99), budget=Budget(), policy="elastic",
            loss_fn=loss_fn, optimizer_fn=plain_sgd, codec=codec, state_dir=tmp_path / str(node),
        )  # fmt: skip

    apps = {
        node: elastic_client_app(lambda _, node=node: client_of(node))
        for node in range(1, len(EXAMPLES) + 1)
    }
    records: list[Any] = []
    strategy = PartialUpdates(quiet(), config=RoundConfig(**terms), on_round=records.append)
    result, _ = run(strategy, apps, arrays_of(net()), 3)
    assert all(not each.rejected for each in records)
    before = as_weights(arrays_of(net()))
    after = as_weights(result.arrays)
    assert any(not np.array_equal(after[name], before[name]) for name in before)


def test_an_interrupted_fit_leaves_everything_as_before_there() -> None:
    model = net().to(DEVICE)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(data(CPU))
    before = state(model)
    bad = [*data(CPU), (torch.full((6, 3, 8, 8), float("nan")), torch.zeros(6, dtype=torch.long))]
    with pytest.raises(TrainingError, match="loss is nan"):
        trainer.fit(bad)
    alike(before, state(model), 0.0)
    assert stays(model)
