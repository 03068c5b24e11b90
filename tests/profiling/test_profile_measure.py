"""Measuring a profile: it leaves no trace, fits the model's graph, and counts memory exactly."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import build, every_model
from small_models import (
    Batch,
    Inception,
    Residual,
    adam,
    chain,
    conv_net,
    images,
    loss_fn,
    sgd,
    vectors,
)
from torch import Tensor, nn

from fl_elastic.errors import ProfileError, TrainingError
from fl_elastic.groups import Mode, tensor_groups
from fl_elastic.groups.forward import compute_loss
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.calibrate import nonnegative_fit
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.memory import step_memory
from fl_elastic.profiling.profile import model_device, profile_key
from fl_elastic.testing.probes import Snapshot


@every_model
@pytest.mark.parametrize("optimizer_fn", [None, sgd, adam], ids=["none", "sgd", "adam"])
def test_measuring_leaves_no_trace(name: str, optimizer_fn: OptimizerFn | None) -> None:
    model, batch = build(name)
    if optimizer_fn is not None:
        # Torch marks the class of an optimiser when the first one is made.
        optimizer_fn(model.parameters())
    torch.autograd.backward(compute_loss(model, loss_fn, batch))
    list(model.modules())[-1].eval()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = Snapshot(model)
    profile_model(model, loss_fn, batch, optimizer_fn=optimizer_fn)
    assert before.differences() == []
    assert all(g is p.grad for g, p in zip(gradients, model.parameters(), strict=True))


def test_parameters_that_were_frozen_stay_out_and_stay_frozen() -> None:
    model = conv_net()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    before = Snapshot(model)
    profile = profile_model(model, loss_fn, images()[0], optimizer_fn=sgd)
    assert before.differences() == []
    grouped = [p for group in profile.graph.groups for p in group.parameters]
    assert "0.weight" not in grouped and "4.bias" not in grouped and "4.weight" in grouped


@every_model
def test_the_profile_is_of_the_models_groups(name: str) -> None:
    model, batch = build(name)
    profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    assert list(profile.graph.groups) == tensor_groups(model, loss_fn, batch)
    assert profile.key == profile_key(model, batch, sgd)
    assert 0 < profile.floor_step_seconds <= profile.full_step_seconds
    assert (np.diff(profile.forward_seconds) >= 0).all()
    assert profile.forward_seconds[0] > 0 and profile.optimizer_seconds.min() >= 0


def test_nodes_without_parameters_cost_no_update() -> None:
    profile = profile_model(conv_net(), loss_fn, images()[0])
    owner = np.array([node.group is not None for node in profile.graph.nodes])
    assert (profile.node_update_seconds[~owner] == 0).all()
    assert profile.node_path_seconds[-1] == 0.0
    assert profile.optimizer_bytes_per_weight == 0.0


@pytest.mark.parametrize(
    ("optimizer_fn", "expected"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0.0),
        (sgd, 4.0),
        (adam, 8.0),
    ],
    ids=["plain", "momentum", "adam"],
)
def test_optimiser_state_is_counted_per_weight(optimizer_fn: OptimizerFn, expected: float) -> None:
    profile = profile_model(chain(), loss_fn, vectors()[0], optimizer_fn=optimizer_fn)
    assert profile.optimizer_bytes_per_weight == pytest.approx(expected)


def bytes_kept_in_a_real_step(
    model: nn.Module, batch: Batch, profile: CostProfile, mask: Tensor
) -> int:
    """Sum the storages that autograd keeps when only the groups in ``mask`` require a gradient."""
    for group, on in zip(profile.graph.groups, mask.tolist(), strict=True):
        for name in group.parameters:
            model.get_parameter(name).requires_grad_(on)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            # Holding the tensor keeps its address from being used again.
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss(model, loss_fn, batch)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    "make",
    [
        chain,
        conv_net,
        lambda: conv_net("group"),
        lambda: conv_net("none"),
        Residual,
        Inception,
    ],
    ids=["chain", "batch norm", "group norm", "no norm", "residual", "inception"],
)
def test_memory_of_every_suffix_is_what_autograd_keeps(make: Callable[[], nn.Module]) -> None:
    batch = vectors()[0] if make is chain else images()[0]
    profile = profile_model(make(), loss_fn, batch, optimizer_fn=sgd)
    for deepest in range(len(profile)):
        mask = torch.arange(len(profile)) <= deepest
        modes = [Mode.FULL if on else Mode.FROZEN for on in mask]
        predicted = step_memory(profile, modes).activations
        assert predicted == bytes_kept_in_a_real_step(make(), batch, profile, mask)


def test_memory_of_convolutions_depends_on_the_deepest_group_alone() -> None:
    batch = images()[0]
    profile = profile_model(conv_net("none"), loss_fn, batch)
    # The head is a matrix product: torch keeps its input, 8 numbers an example, only if it is trained.
    head = 4 * 8 * len(batch[0])
    frozen, full = Mode.FROZEN, Mode.FULL
    for deepest in range(1, len(profile)):
        after = [frozen] * (len(profile) - deepest - 1)
        kept_alone = step_memory(profile, [frozen] * deepest + [full, *after]).activations
        kept_suffix = step_memory(profile, [full] * (deepest + 1) + after).activations
        assert kept_alone == kept_suffix - head > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_without_finite_loss_is_refused(value: float) -> None:
    inputs, targets = vectors()[0]
    model = chain()
    before = Snapshot(model)
    with pytest.raises(TrainingError, match="the loss on the profiling batch is"):
        profile_model(model, loss_fn, (torch.full_like(inputs, value), targets))
    assert before.differences() == []


def test_a_batch_that_does_not_fit_is_one_line_and_leaves_no_trace() -> None:
    model = conv_net()
    before = Snapshot(model)
    with pytest.raises(TrainingError) as caught:
        profile_model(model, loss_fn, vectors()[0], optimizer_fn=sgd)
    assert "\n" not in str(caught.value)
    assert before.differences() == []


def test_keys_tell_models_shapes_and_threads_apart() -> None:
    batch = vectors()[0]
    key = profile_key(chain(), batch)
    assert key == profile_key(chain(), vectors(seed=7)[0])
    assert key.batch_shape == (8, 6) and key.threads == 1
    assert key.torch_version == torch.__version__ and key.device.startswith("cpu: ")
    assert key != profile_key(chain(), vectors(size=4)[0])
    frozen = chain()
    frozen[0].weight.requires_grad_(False)
    wider = nn.Sequential(nn.Linear(6, 13), *list(chain())[1:])
    assert len({key.model, profile_key(frozen, batch).model, profile_key(wider, batch).model}) == 3


def test_a_key_holds_the_shape_of_the_inputs_and_not_of_the_labels() -> None:
    """Collators of transformers put these first: images of all sizes would have the same costs."""
    rows, classes = vectors()[0]
    for batch in ({"labels": classes, "rows": rows}, {"rows": rows, "labels": classes}):
        assert profile_key(chain(), batch).batch_shape == (8, 6)


def test_keys_tell_optimisers_apart_by_what_they_cost() -> None:
    model, batch = chain(), vectors()[0]
    made: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        None,
    ]
    assert len({profile_key(model, batch, each) for each in made}) == len(made)
    assert profile_key(model, batch, made[0]) == profile_key(
        model, batch, lambda p: torch.optim.SGD(p, lr=0.7)
    )


def test_a_model_without_parameters_is_on_the_cpu() -> None:
    assert model_device(nn.ReLU()) == torch.device("cpu")


def test_the_clock_of_one_thread_counts_its_own_work_only() -> None:
    clock = clock_for("cpu", "auto")
    assert clock is clock_for("cpu", "cpu")
    started = clock()
    threading.Event().wait(0.05)
    assert clock() - started < 0.04


def test_a_cpu_clock_with_several_threads_is_refused() -> None:
    torch.set_num_threads(2)
    with pytest.raises(ProfileError, match="needs one torch thread"):
        clock_for("cpu", "cpu")
    assert clock_for("cpu", "auto") is clock_for("cpu", "wall")


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(ProfileError, match="'sun' is unknown"):
        clock_for("cpu", "sun")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "xpu"])
def test_the_clock_waits_for_what_is_queued(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    clock = clock_for(device)
    assert not waited and clock() <= clock() and waited == [torch.device(device)] * 2


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_recovers_coefficients_that_are_not_negative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.uniform(0.1, 2, (6, 3))
    truth = np.where(rng.random(3) < 0.3, 0.0, rng.uniform(0.5, 2, 3))
    truth[0] = 1.0
    assert nonnegative_fit(features, features @ truth) == pytest.approx(truth, abs=1e-6)


def test_the_fit_never_gives_negative_coefficients() -> None:
    features = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    found = nonnegative_fit(features, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all() and found[1] > 0 and found[0] == 0


def test_measuring_holds_on_to_no_tensor() -> None:
    def living() -> int:
        gc.collect()
        with warnings.catch_warnings():
            # Looking at every object touches some that torch has deprecated.
            warnings.simplefilter("ignore")
            return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    model, batch = conv_net(), images()[0]
    profile_model(model.train(), loss_fn, batch, optimizer_fn=sgd)
    before = living()
    for _ in range(3):
        profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    assert living() <= before
