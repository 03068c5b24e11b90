"""Modules, batches and optimisers that nobody here wrote: training does what the plan says, or says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import (
    Batch,
    chain,
    conv_net,
    images,
    loss_fn,
    same_weights,
    sgd,
    trainer_of,
    vectors,
    weights_of,
)
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from trainer_settings import options_of

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ElasticError, ModelError, TrainingError
from fl_elastic.flower import ElasticClient
from fl_elastic.flower.records import PACKED
from fl_elastic.groups import tensor_groups
from fl_elastic.training import ElasticTrainer, ForwardOptions, Timing, TrainerOptions
from fl_elastic.update import Manifest, decode, encode
from fl_elastic.update import weights_of as arrays_of
from fl_elastic.update.model_wire import encode_weights


class Experts(nn.Module):
    """Two experts, of which each batch uses the one that its first number names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts[int(x[0, 0] > 0)]
        out: Tensor = self.head(torch.relu(chosen(torch.relu(self.stem(x)))))
        return out


class TwoHeads(nn.Module):
    """A head for batches of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.left if x[0, 0] > 0 else self.right)(torch.relu(self.stem(x)))
        return out


class OwnNorm(nn.Module):
    """A norm of the user's own, with running statistics that no class of torch knows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.square.mul_(0.9).add_(0.1 * x.square().mean(0))
        out: Tensor = self.scale * (x - self.mean) / (self.square + 1e-5).sqrt()
        return out


def routed(batches: int, sign: int | None = None) -> list[Batch]:
    """Batches that name their expert, in turn unless one sign is asked for."""
    found = vectors(batches)
    for index, (inputs, _) in enumerate(found):
        inputs[0, 0] = abs(inputs[0, 0]) * (sign or (-1) ** index)
    return found


def plainly_trained(model: nn.Module, batches: list[Batch], optimizer_fn: Any = sgd) -> nn.Module:
    """The slow obvious reference: every parameter, one step a batch."""
    twin = copy.deepcopy(model)
    optimizer = optimizer_fn(twin.parameters())
    for inputs, targets in copy.deepcopy(batches):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(twin(inputs), targets).backward()
        optimizer.step()
    return twin


@pytest.mark.parametrize("make", [Experts, TwoHeads])
def test_what_one_batch_does_not_use_is_trained_when_another_does(
    make: Callable[[], nn.Module],
) -> None:
    model, batches = make(), routed(6)
    twin = plainly_trained(model, batches)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    assert same_weights(weights_of(twin), model)
    assert set(trainer.update().deltas) == set(model.state_dict())


@pytest.mark.parametrize("make", [Experts, TwoHeads])
def test_groups_are_those_of_the_model_whatever_the_batch(make: Callable[[], nn.Module]) -> None:
    model = make()
    seen = [tensor_groups(model, loss_fn, routed(1, sign)[0]) for sign in (1, -1)]
    names = [{group.name: group.parameters for group in groups} for groups in seen]
    assert names[0] == names[1]
    assert {name for group in seen[0] for name in group.parameters} == {
        name for name, _ in model.named_parameters()
    }
    if make is Experts:
        order = [[group.name for group in groups] for groups in seen]
        for names_in_order in order:
            assert names_in_order[0] == "head" and names_in_order[-1] == "stem"


def test_steps_count_only_the_batches_that_reached_a_tensor() -> None:
    model, batches = TwoHeads(), [*routed(4, sign=1), *routed(2, sign=-1)]
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    steps = trainer.update().steps
    assert (steps["stem.weight"], steps["left.weight"], steps["right.weight"]) == (6, 4, 2)


@pytest.mark.parametrize("speedup", [None, 1.5, 3.0])
@pytest.mark.parametrize("policy", ["elastic", "last_k", "random", "head"])
def test_a_plan_whose_groups_a_batch_does_not_use_is_no_failure(
    policy: str, speedup: float | None
) -> None:
    for make in (Experts, TwoHeads):
        model = make()
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(speedup=speedup), policy=policy)
        report = trainer.fit(routed(8))
        assert report.steps > 0
        trainer.update()


def test_running_statistics_of_an_own_norm_travel() -> None:
    model = nn.Sequential(nn.Linear(6, 8), OwnNorm(8), nn.ReLU(), nn.Linear(8, 3))
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    base = weights_of(model)
    trainer.fit(vectors(4))
    update = trainer.update()
    for name in ("1.mean", "1.square"):
        assert np.allclose(base[name].numpy() + update.deltas[name], model.state_dict()[name])
        assert update.steps[name] == 4


def test_vectors_of_a_spectral_norm_travel() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)
    )
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(vectors(3))
    sent = set(trainer.update().deltas)
    assert {name for name in model.state_dict() if name.endswith(("._u", "._v"))} <= sent


def quantised(config: Any, batches_seen: int) -> nn.Module:
    """A model that is trained for quantisation, as torch prepares it."""
    torch.manual_seed(2)
    model = nn.Sequential(
        quantization.QuantStub(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), quantization.DeQuantStub(),
    ).train()  # fmt: skip
    model.qconfig = config
    quantization.prepare_qat(model, inplace=True)
    for inputs, _ in images(batches_seen):
        model(inputs)
    return model


PER_TENSOR = quantization.QConfig(
    activation=quantization.default_fake_quant, weight=quantization.default_weight_fake_quant
)
PER_CHANNEL = quantization.get_default_qat_qconfig("fbgemm")


@pytest.mark.parametrize("config", [PER_TENSOR, PER_CHANNEL], ids=["per tensor", "per channel"])
def test_what_observers_saw_travels(config: Any) -> None:
    model = quantised(config, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(images(3))
    update = trainer.update()
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not torch.equal(value, before[name]):
            assert name in update.deltas, name
    assert any(name.endswith("max_val") for name in update.deltas)
    manifest = Manifest.of(model)
    assert decode(encode(update, manifest), manifest).deltas.keys() == update.deltas.keys()


def test_observers_that_begin_at_infinity_stay_the_devices_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = quantised(PER_TENSOR, 0)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    assert trainer.fit(images(3)).steps == 3
    sent = trainer.update().deltas
    assert "1.weight" in sent and not any(name.endswith("max_val") for name in sent)
    assert all(np.isfinite(delta).all() for delta in sent.values())
    assert "max_val' began at infinity" in caplog.text


def test_a_buffer_that_grows_is_refused_and_the_model_as_before() -> None:
    model = quantised(PER_CHANNEL, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
        with pytest.raises(TrainingError, match="run the model on a batch before"):
            trainer.fit(images(3))
        for name, value in model.state_dict().items():
            assert value.shape == before[name].shape and torch.equal(value, before[name]), name
    for inputs, _ in images(1):
        model(inputs)
    assert ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full").fit(images(3)).steps


def test_a_kept_profile_freezes_no_experts_that_its_batch_did_not_use(tmp_path: Path) -> None:
    for sign, expert in ((1, 1), (-1, 0)):
        torch.manual_seed(0)
        model = Experts()
        manifest = Manifest.of(model)
        packed = np.frombuffer(encode_weights(arrays_of(model, manifest), manifest), np.uint8)
        client = ElasticClient(
            model, routed(6, sign), routed(1), budget=Budget(), policy="full",
            loss_fn=loss_fn, optimizer_fn=sgd, state_dir=tmp_path,
        )  # fmt: skip
        arrays, _, _ = client.fit([packed], {PACKED: True})
        sent = decode(arrays[0].tobytes(), manifest).deltas
        assert any(name.startswith(f"experts.{expert}.") for name in sent), (sign, sorted(sent))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("policy", ["full", "elastic", "joint", "tinytrain"])
def test_a_parametrised_convolution_trains_also_under_a_memory_budget(
    norm: Any, policy: str
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        norm(nn.Conv2d(3, 4, 3, padding=1, bias=False)), nn.BatchNorm2d(4), nn.ReLU(),
        norm(nn.Conv2d(4, 4, 3, padding=1, bias=False)), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    twin = plainly_trained(model, images(3))
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(memory=1e9), policy=policy)
    report = trainer.fit(images(3))
    update = trainer.update()
    for name in report.plan.trained_parameters:
        if name in update.steps and all(str(mode) == "full" for mode in report.plan.modes):
            assert update.deltas[name].any(), f"{name} travels unchanged"
            assert torch.allclose(model.state_dict()[name], twin.state_dict()[name], atol=1e-6)


class Breaks:
    """A loader that fails at its third batch, the second time it is read or later."""

    def __init__(self, batches: list[Batch], error: BaseException) -> None:
        self.batches, self.error, self.armed = batches, error, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if self.armed and index == 2:
                raise self.error
            yield batch


@pytest.mark.parametrize(
    "error", [OSError("disk"), KeyboardInterrupt(), MemoryError(), KeyError("loss")]
)
def test_whatever_fails_model_and_optimiser_are_as_before(error: BaseException) -> None:
    model, loader = conv_net(), Breaks(images(5), error)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    trainer = ElasticTrainer(
        model, loss_fn, lambda p: torch.optim.Adam(p, lr=0.01), budget=Budget(), policy="full"
    )
    trainer.fit(loader)
    before, scratch = weights_of(model), model.scratch.clone()
    assert trainer.optimizer is not None
    state = copy.deepcopy(trainer.optimizer.state_dict())
    loader.armed = True
    with pytest.raises(type(error)):
        trainer.fit(loader)
    assert same_weights(before, model) and torch.equal(model.scratch, scratch)
    now = trainer.optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    assert _equal(now["state"], state["state"])
    assert trainer.update().deltas == {}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_a_rate_that_overflows_the_weights_is_an_error_and_leaves_them() -> None:
    model = chain()
    before = weights_of(model)
    trainer = ElasticTrainer(
        model, loss_fn, lambda p: torch.optim.SGD(p, lr=1e38), budget=Budget(), policy="full"
    )
    with pytest.raises(TrainingError, match="finite"):
        trainer.fit([(inputs * 1e3, targets) for inputs, targets in vectors(1)])
    assert same_weights(before, model)


def examples_of(loader: Any) -> int:
    trainer = ElasticTrainer(chain(), loss_fn, sgd, budget=Budget(), policy="head")
    trainer.fit(loader)
    return trainer.update().num_examples


def hundred() -> TensorDataset:
    inputs, targets = vectors(1, size=100)[0]
    return TensorDataset(inputs, targets)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 8}, 100),
        ({"batch_size": 8, "drop_last": True}, 96),
        ({"batch_size": 5, "sampler": SubsetRandomSampler(range(10))}, 10),
        ({"batch_size": 4, "sampler": SubsetRandomSampler(range(10)), "drop_last": True}, 8),
        ({"batch_sampler": BatchSampler(range(30), 10, drop_last=False)}, 30),
        ({"batch_sampler": [[0, 1, 2], [3, 4, 5], [6]]}, 7),
        ({"batch_size": 10, "sampler": RandomSampler(range(100), num_samples=20)}, 20),
    ],
    ids=["plain", "drop last", "sampler", "both", "batch sampler", "own batches", "drawn"],
)
def test_examples_are_those_that_the_loader_gives(settings: dict[str, Any], expected: int) -> None:
    assert examples_of(DataLoader(hundred(), **settings)) == expected


def test_a_stream_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_elastic.training.loader._MOST_BATCHES", 1000)

    class Endless(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Any]:
            batch = vectors(1)[0]
            while True:
                yield batch

    with pytest.raises(TrainingError, match="islice"):
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget(), policy="head").fit(
            DataLoader(Endless(), batch_size=None)
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_cached_features_keep_the_type_of_the_model(dtype: torch.dtype) -> None:
    model = conv_net("none").to(dtype)
    batches = [(inputs.to(dtype), targets) for inputs, targets in images(2)]
    trainer = trainer_of(
        model, batches[0], ["11"], forward=ForwardOptions(feature_bytes=1 << 20, precision="fp32")
    )
    report = trainer.fit(batches, epochs=3)
    assert report.forward is not None and report.forward.found > 0
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda: ElasticTrainer(chain(), loss_fn, sgd, budget=2.0), r"Budget\(speedup=2.0\)"),  # type: ignore[arg-type]
        (
            lambda: ElasticTrainer(
                chain(), loss_fn, lambda p: None, budget=Budget()  # type: ignore[arg-type,return-value]
            ).fit(vectors(2)),
            "optimizer_fn returned NoneType",
        ),
        (
            lambda: ElasticTrainer(
                chain(), loss_fn, lambda p: torch.optim.LBFGS(p), budget=Budget()
            ).fit(vectors(2)),
            "LBFGS",
        ),
        (
            lambda: ElasticTrainer(
                chain().to("meta"), loss_fn, sgd, budget=Budget()
            ).fit(vectors(2)),
            "meta",
        ),
        (
            lambda: ElasticTrainer(
                nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)),
                loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), budget=Budget(),
            ).fit([(torch.randint(9, (8, 5)), torch.randint(3, (8,))) for _ in range(3)]),
            "sparse=True",
        ),
    ],
    ids=["budget", "no optimiser", "LBFGS", "meta", "sparse"],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_clear_line(fit: Callable[[], Any], message: str) -> None:
    with pytest.raises(ElasticError, match=message) as caught:
        fit()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance": "nonsense"}, "nonsense"),
        ({"clock": "sundial"}, "sundial"),
    ],
)
def test_options_are_checked_when_they_are_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ElasticError, match=message):
        options_of(**settings)


@pytest.mark.parametrize("budget", [Budget(deadline=1e-9), Budget(speedup=1e12)])
@pytest.mark.parametrize("policy", ["elastic", "full", "head"])
def test_a_budget_below_one_step_is_refused_not_overrun(budget: Budget, policy: str) -> None:
    model = chain()
    before = weights_of(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=budget, policy=policy)
    with pytest.raises(BudgetError, match="step"):
        trainer.fit(vectors(6))
    assert same_weights(before, model)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = chain().requires_grad_(False)
    with pytest.raises(ModelError, match="trainable"):
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(vectors(2))


def test_the_global_generator_does_not_depend_on_what_was_measured() -> None:
    states = []
    for known in (False, True):
        torch.manual_seed(5)
        model = conv_net()
        trainer = ElasticTrainer(
            model, loss_fn, sgd, budget=Budget(), policy="joint",
            options=TrainerOptions(timing=Timing(closed_loop=False)),
        )  # fmt: skip
        if known:
            state = torch.get_rng_state()
            twin = ElasticTrainer(
                copy.deepcopy(model), loss_fn, sgd, budget=Budget(), policy="joint"
            )
            twin.fit(images(2))
            trainer.profile = twin.profile
            torch.set_rng_state(state)
        trainer.fit(images(2))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
