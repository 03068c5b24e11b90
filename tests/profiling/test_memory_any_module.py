"""Bytes that a step is predicted to keep are those that it keeps, also where lean layers decline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from kept_bytes import kept_bytes
from peak_bytes import peak_bytes
from slow_ones import slow_unless
from small_models import Batch, loss_fn, sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning import PlanRequest
from fl_elastic.planning.policy import POLICIES
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.kept_tensors import in_flight
from fl_elastic.profiling.memory import mask_bytes, step_memory
from fl_elastic.training import ElasticTrainer
from fl_elastic.training.apply_plan import plan_applied
from fl_elastic.training.costs import costs_for
from fl_elastic.training.options import TrainerOptions


class Pooled(nn.Module):
    """A head on the mean over all positions."""

    def __init__(self, *body: nn.Module, features: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        out: Tensor = self.head(y.flatten(2).mean(2))
        return out


class FunctionalBlock(nn.Module):
    """A residual block that ends in a functional relu."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class Recurrent(nn.Module):
    """A recurrent layer over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(48, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x.permute(0, 2, 1, 3).flatten(2))
        out: Tensor = self.head(states[:, -1])
        return out


class Rows(nn.Module):
    """One-dimensional convolutions over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(48, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 16, 3, padding=1),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.permute(0, 1, 3, 2).flatten(1, 2)).mean(2))
        return out


def conv(inputs: int, outputs: int, **settings: object) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **settings)  # type: ignore[arg-type]


class Queries(nn.Module):
    """Learned queries that pass layers of their own before they look at the picture, as in detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.queries = nn.Parameter(torch.randn(200, 8))
        self.own = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.relu(self.stem(x)).flatten(2)[:, :, :16]
        asked = self.norm(self.own(self.queries))
        out: Tensor = self.head((asked @ seen).softmax(1).transpose(1, 2) @ asked).mean(1)
        return out


class Tokens(nn.Module):
    """Linear layers on tokens, whose outputs are views that the activations overwrite."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(width, 24) for width in (12, 24, 24)]
        self.body = nn.Sequential(
            *(nn.Sequential(each, nn.Hardswish(inplace=True)) for each in layers)
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.reshape(len(x), 64, 12)).mean(1))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Pooled(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.ReLU(), features=8),
    "in place": lambda: Pooled(
        conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(8, 8), nn.ReLU(inplace=True), features=8
    ),
    "ceil_mode": lambda: Pooled(
        conv(3, 8), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), conv(8, 8), nn.ReLU(),
        nn.MaxPool2d(2), conv(8, 8), features=8,
    ),
    "functional relu": lambda: Pooled(conv(3, 8), FunctionalBlock(8), FunctionalBlock(8), features=8),
    "circular": lambda: Pooled(
        conv(3, 8, padding_mode="circular"), nn.ReLU(), conv(8, 8, padding_mode="circular"), features=8
    ),
    "transposed": lambda: Pooled(
        conv(3, 8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU(), conv(8, 8), features=8
    ),
    "parametrised": lambda: Pooled(
        parametrizations.weight_norm(conv(3, 8)), nn.ReLU(), parametrizations.weight_norm(conv(8, 8)), features=8
    ),
    "group norm": lambda: Pooled(conv(3, 8), nn.GroupNorm(2, 8), nn.ReLU(), conv(8, 8), nn.SiLU(), features=8),
    "own statistics": lambda: Pooled(
        conv(3, 8), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(), conv(8, 8), features=8
    ),
    "tokens": Tokens,
    "recurrent": Recurrent,
    "rows": Rows,
    "learned queries": Queries,
}  # fmt: skip


def pictures() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8) % 3


@cache
def measured(name: str) -> tuple[nn.Module, CostProfile]:
    """A model, which no test changes, and its costs on the pictures."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, profile_model(model, loss_fn, pictures(), optimizer_fn=sgd)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_are_those_that_hooks_count(name: str, lean: bool) -> None:
    (model, profile), batch = measured(name), pictures()
    budget = Budget(memory=1e12) if lean else Budget()
    request = PlanRequest(profile, budget, np.ones(len(profile)))
    generator = np.random.default_rng(3)
    masks = [np.ones(len(profile), dtype=bool), request.head_mask()]
    masks += [request.head_mask() | (generator.random(len(profile)) < 0.5) for _ in range(6)]
    for mask in masks:
        plan = request.plan_of_mask("test", mask)
        predicted = step_memory(profile, plan.modes, lean=lean).activations
        with untouched(model), plan_applied(plan, model):
            kept = kept_bytes(lambda: compute_loss(model, loss_fn, batch), besides=model)
        # Besides activations a trained norm keeps its batch's mean and deviation, the loss a few numbers.
        assert abs(kept - predicted) <= 0.05 * kept + 600, (mask.tolist(), kept, predicted)


@pytest.mark.parametrize("name", MODELS)
def test_the_quick_count_of_a_mask_is_the_count_of_its_modes(name: str) -> None:
    _, profile = measured(name)
    generator = np.random.default_rng(1)
    for lean in (True, False):
        for _ in range(20):
            mask = generator.random(len(profile)) < generator.random()
            modes = [Mode.FULL if on else Mode.FROZEN for on in mask]
            exact = step_memory(profile, modes, lean=lean).total
            assert mask_bytes(profile, mask, lean=lean) == pytest.approx(exact)


def test_a_declined_layer_is_predicted_as_plain() -> None:
    torch.manual_seed(0)
    both = []
    for ceil in (False, True):
        model = Pooled(
            conv(3, 8), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=ceil), conv(8, 8), features=8
        )
        profile = profile_model(model, loss_fn, pictures(), optimizer_fn=sgd)
        frozen = [Mode.FROZEN] * (len(profile) - 1) + [Mode.FULL]
        both.append(step_memory(profile, frozen, lean=True).activations)
    # The input of the pooling, and an index of eight bytes for each output, instead of one byte.
    assert both[1] - both[0] >= 4 * 8 * 8 * 16 * 16


@pytest.mark.parametrize("lean", slow_unless(bool, [True, False]))
@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_takes_at_its_peak_is_predicted(name: str, lean: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(64, 3, 16, 16, generator=generator), torch.arange(64) % 3
    profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(memory=1e12) if lean else Budget(), np.ones(len(profile)))
    everything = np.ones(len(profile), dtype=bool)
    late = np.arange(len(profile)) < max(len(profile) // 2, 1)
    counted_on = in_flight(profile.graph).inference
    with untouched(model), torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(batch[0]), tmp_path)

    def step() -> None:
        compute_loss(model, loss_fn, batch).backward()  # type: ignore[no-untyped-call]

    for mask in (everything, late):
        plan = request.plan_of_mask("test", mask)
        with untouched(model), plan_applied(plan, model):
            taken = peak_bytes(step, tmp_path)
        moment = step_memory(profile, plan.modes, lean=lean).moment
        assert taken <= max(inference, 1.3 * (counted_on + moment)) + 20_000


@pytest.mark.parametrize("name", MODELS)
def test_inference_takes_at_least_what_is_counted_on(name: str, tmp_path: Path) -> None:
    (model, profile), batch = measured(name), pictures()
    model = deepcopy(model).eval()
    with torch.no_grad():
        taken = peak_bytes(lambda: model(batch[0]), tmp_path)
    assert in_flight(profile.graph).inference <= taken


def decoder(*up: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), *up)


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "transposed, one channel": lambda: decoder(nn.ConvTranspose2d(24, 1, 4, 2, 1)),
    "transposed, three channels": lambda: decoder(nn.ConvTranspose2d(24, 3, 4, 2, 1)),
    "upsampled": lambda: decoder(nn.Upsample(scale_factor=2), nn.Conv2d(24, 3, 3, padding=1)),
    "segmenting": lambda: nn.Sequential(conv(1, 24), nn.ReLU(), nn.Conv2d(24, 2, 1)),
    "signals": lambda: nn.Sequential(
        nn.Conv1d(1, 24, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(24, 1, 4, 2, 1)
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_needs_no_more_than_its_peak_beyond_inference(name: str, tmp_path: Path) -> None:
    """Maps of few channels, whose reordering inference pays as well."""
    torch.manual_seed(0)
    model = DECODERS[name]()
    inputs = torch.randn(8, 1, *((4096,) if name == "signals" else (64, 64)))
    targets = torch.zeros_like(model(inputs))

    def distance(outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs - wanted).square().mean()

    batch = inputs, targets
    profile = profile_model(model, distance, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(), np.ones(len(profile)))
    with untouched(model), torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(inputs), tmp_path)
    for mask in (request.head_mask(), np.ones(len(profile), dtype=bool)):
        plan = request.plan_of_mask("test", mask)
        with untouched(model), plan_applied(plan, model):
            taken = peak_bytes(
                lambda: compute_loss(model, distance, batch).backward(),
                tmp_path,  # type: ignore[no-untyped-call]
            )
        moment = step_memory(profile, plan.modes).moment
        # The loss keeps a map of differences, which inference does not make.
        most = 1.5 * max(taken - inference, 0) + 2 * targets.nbytes
        assert moment <= most, (mask, moment, taken, inference)
        assert taken <= max(inference, 1.3 * (in_flight(profile.graph).inference + moment))


class Attending(nn.Module):
    """Attention written out, with a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Linear(48, 3 * 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.three(x).chunk(3, dim=-1)
        weights = functional.softmax(query @ key.transpose(1, 2), dim=-1)
        return functional.dropout(weights, 0.1, self.training) @ value


class Weighing(nn.Module):
    """Torch's attention where somebody asks for its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        answer, _ = self.attention(x, x, x, need_weights=True)
        return torch.as_tensor(answer)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Sequences(nn.Module):
    """A head on the mean of what a body makes of a sequence."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.middle, self.head = nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.body(x)).mean(1))
        return out


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder,
    "written out": Attending,
    "weights asked for": Weighing,
    "wide": lambda: nn.Sequential(nn.Linear(48, 512), nn.Dropout(0.2), nn.Linear(512, 48)),
    "channels": lambda: nn.Sequential(nn.Conv1d(150, 150, 1), nn.ReLU(), nn.Dropout1d(0.2)),
}


def peaks(
    model: nn.Module, batch: tuple[Tensor, Tensor], counts: tuple[int, ...], folder: Path
) -> Iterator[tuple[float, float, float]]:
    """Of a step on so many groups, and on all: bytes taken, what is counted on, and the most that is promised."""
    profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(memory=1e12), np.ones(len(profile)))
    with untouched(model), torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(batch[0]), folder)
    counted_on = in_flight(profile.graph).inference
    for count in (*counts, len(profile)):
        plan = request.plan_of_mask("test", np.arange(len(profile)) < count)
        with untouched(model), plan_applied(plan, model):
            taken = peak_bytes(lambda: compute_loss(model, loss_fn, batch).backward(), folder)
        moment = step_memory(profile, plan.modes, lean=True).moment
        yield taken, moment, max(inference, 1.2 * (counted_on + moment))


@pytest.mark.parametrize("name", DROPPING)
def test_dropping_out_takes_memory_also_below_what_is_trained(name: str, tmp_path: Path) -> None:
    """Inference drops nothing, and torch's attention then never holds its weights."""
    torch.manual_seed(0)
    model, batch = Sequences(DROPPING[name]()), (torch.randn(8, 150, 48), torch.arange(8) % 3)
    for taken, moment, most in peaks(model, batch, (1, 2, 3), tmp_path):
        assert taken <= most + 20_000 and moment <= 1.1 * taken


class LastChannels(nn.Module):
    """Norms over the channels, as in ConvNeXt: every map lies with the channels last."""

    def __init__(self, channels: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, 4)
        self.norm = nn.LayerNorm(channels)
        self.mixing = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups)
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = self.head(self.mixing(y).mean((2, 3)))
        return out


def deployed() -> nn.Module:
    model = Pooled(nn.Conv2d(3, 64, 4, 4), nn.Conv2d(64, 64, 5, padding=2, groups=64), features=64)
    return model.to(memory_format=torch.channels_last)


LAST: dict[str, Callable[[], nn.Module]] = {
    "depthwise": lambda: LastChannels(128, 7, 128),
    "depthwise, small kernel": lambda: LastChannels(128, 3, 128),
    "full": lambda: LastChannels(128, 3, 1),
    "grouped": lambda: LastChannels(128, 3, 4),
    "weights too": deployed,
}


@pytest.mark.parametrize("side", [4, 32])
@pytest.mark.parametrize("name", LAST)
def test_maps_with_the_channels_last_take_filters_in_another_order(
    name: str, side: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batch = LAST[name](), (torch.randn(4, 3, side, side), torch.arange(4) % 3)
    # A filter in another order is what inference may take as well.
    filters = sum(each.nbytes for each in model.parameters())
    for taken, moment, most in peaks(model, batch, (1, 2), tmp_path):
        assert taken <= most + 50_000 and moment <= 1.3 * taken + 2 * filters


class LongMemory(nn.Module):
    """A head on the last state of one or two LSTMs, over batches with the examples or the time first."""

    def __init__(self, layers: int, dropout: float, batch_first: bool) -> None:
        super().__init__()
        self.cell = nn.LSTM(16, 64, layers, dropout=dropout, batch_first=batch_first)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.cell(x)
        out: Tensor = self.head(state[-1])
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.0), (2, 0.3)])
def test_below_a_head_an_lstm_takes_what_inference_takes(
    layers: int, dropout: float, batch_first: bool, tmp_path: Path
) -> None:
    """Torch fills a work space for the backward pass of several times its output, though nothing asks for one."""
    torch.manual_seed(0)
    model, x = LongMemory(layers, dropout, batch_first), torch.randn(64, 50, 16)
    batch = x if batch_first else x.transpose(0, 1).contiguous(), torch.arange(64) % 3
    with torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(batch[0]), tmp_path)
    budget = 5e6
    trainer = ElasticTrainer(model.train(), loss_fn, sgd, budget=Budget(memory=budget))
    for _ in range(2):
        taken = peak_bytes(lambda: trainer.fit([batch] * 2), tmp_path)
        assert taken <= inference + budget
    assert trainer.update().deltas.keys() == {"head.weight", "head.bias"}


class Computed(nn.Module):
    """A head on what an operation makes of the output of a layer, and of some weights."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], *weights: int) -> None:
        super().__init__()
        self.operation, self.first = operation, nn.Linear(48, 48)
        self.weights, self.head = nn.Parameter(torch.randn(weights or (1,))), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.operation(self.first(x), self.weights)
        out: Tensor = self.head(y.mean(1))
        return out


def spread(x: Tensor, weights: Tensor) -> Tensor:
    """Channels taken apart and put together again."""
    return torch.cat([functional.conv1d(x.transpose(1, 2), each) for each in weights], 1)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: Computed(lambda x, w: functional.bilinear(x, x, w), 8, 48, 48),
    "distances": lambda: Computed(torch.cdist, 48, 48),
    "cosine": lambda: Computed(
        lambda x, w: functional.cosine_similarity(x.unsqueeze(2), w, dim=-1), 20, 48
    ),
    "sums of powers": lambda: Computed(lambda x, _: x.logcumsumexp(1)),
    "exponential": lambda: Computed(lambda x, _: torch.matrix_exp(x.transpose(1, 2) @ x * 1e-3)),
    "joined": lambda: Computed(spread, 3, 20, 48, 1),
    "projected": lambda: Sequences(
        nn.Sequential(nn.LSTM(48, 96, proj_size=48, batch_first=True), First())
    ),
}


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


@pytest.mark.parametrize("name", COMPUTED)
def test_what_operations_take_for_a_moment_is_concluded_from_a_part_of_the_batch(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batch = COMPUTED[name](), (torch.randn(40, 20, 48), torch.arange(40) % 3)
    model(batch[0])
    profile = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd, memory=1e9)
    moment = step_memory(profile, [Mode.FULL] * len(profile)).moment
    taken = peak_bytes(lambda: compute_loss(model, loss_fn, batch).backward(), tmp_path)  # type: ignore[no-untyped-call]
    assert 0.9 * taken <= in_flight(profile.graph).inference + moment <= 1.2 * taken


def test_an_optimiser_that_computes_through_two_tensors_is_charged_for_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 3))
    batch = torch.randn(4, 64), torch.arange(4) % 3
    profile = profile_model(model, loss_fn, batch, optimizer_fn=torch.optim.Adam)
    budget = Budget(memory=1.02 * mask_bytes(profile, np.ones(len(profile), dtype=bool)))
    trainer = ElasticTrainer(model, loss_fn, torch.optim.Adam, budget=budget, profile=profile)
    with torch.no_grad():
        inference = peak_bytes(lambda: model(batch[0]), tmp_path)
    taken = peak_bytes(lambda: trainer.fit([batch] * 2), tmp_path)
    assert trainer.plan is not None and trainer.plan.mask.all()
    assert taken <= inference + budget.memory  # type: ignore[operator]


def test_costs_without_a_record_do_not_serve_a_memory_budget() -> None:
    torch.manual_seed(0)
    batch = torch.randn(40, 20, 48), torch.arange(40) % 3
    model = COMPUTED["bilinear"]()
    model(batch[0])
    known = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd)

    def planned(memory: float | None) -> CostProfile:
        return costs_for(
            POLICIES.make("full"), known, model, loss_fn, batch, optimizer_fn=sgd,
            budget=Budget(memory=memory), options=TrainerOptions(),
        )  # fmt: skip

    assert planned(None) is known
    everything = np.ones(len(known), dtype=bool)
    assert mask_bytes(planned(1e9), everything) > 3 * mask_bytes(known, everything)


def test_timing_an_optimiser_takes_no_more_than_a_small_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    batch, budget = (torch.randn(16, 64), torch.arange(16) % 3), 1e6
    with torch.no_grad():
        inference = peak_bytes(lambda: model(batch[0]), tmp_path)
    trainer = ElasticTrainer(model, loss_fn, torch.optim.Adam, budget=Budget(memory=budget))
    assert peak_bytes(lambda: trainer.fit([batch] * 2), tmp_path) <= inference + budget
