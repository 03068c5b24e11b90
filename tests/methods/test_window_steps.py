"""Steps on windows of channels against slow ones of the whole model with all other channels masked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_model
from small_models import Heads, SqueezeExcite, chain, conv_net, images, loss_fn, vectors
from torch import Tensor, nn
from window_units import kept_units

from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.graph import Width
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.groups.trace import tensor_groups, trace_step
from fl_elastic.methods.windows.proven_widths import prove_widths, proven_widths
from fl_elastic.methods.windows.steps import WindowSteps
from fl_elastic.methods.windows.windows import Windows

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def group_norms() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)
    )  # fmt: skip


def gate() -> nn.Module:
    torch.manual_seed(3)
    return SqueezeExcite()


def norms() -> nn.Module:
    torch.manual_seed(4)
    model = conv_net()
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            # A bias that a norm takes away again has a gradient of rounding errors, of which Adam makes steps.
            layer.bias = None
    return model


def heads() -> nn.Module:
    torch.manual_seed(5)
    return Heads()


MODELS = {
    "perceptron": perceptron, "groups": group_norms, "gate": gate, "norms": norms, "heads": heads,
}  # fmt: skip


def data_for(model: nn.Module) -> list[Any]:
    return vectors(4) if next(model.parameters()).dim() == 2 else images(4)


def in_double(batches: list[Any]) -> list[Any]:
    return [(x.double() if x.is_floating_point() else x, y) for x, y in batches]


@dataclass(frozen=True)
class At(Windows):
    """Windows that begin at one unit of every width."""

    start: int = 0

    def starts(self, step: int = 0) -> dict[str, int]:
        return {width.name: self.start % width.size for width in self.widths}


def widths_of(model: nn.Module, batch: Any) -> tuple[Width, ...]:
    found = trace_step(copy.deepcopy(model), loss_fn, batch).graph.widths
    assert found
    return found


def units_of(width: Width, length: int, start: int, repeat: int = 1) -> Tensor:
    """Whether each entry of an axis is in the window, by counting units."""
    held = torch.zeros(width.size, width.unit * repeat, dtype=torch.float64)
    held[kept_units(width.size, length, start)] = 1
    return held.reshape(-1)


def axes_of(width: Width) -> list[tuple[str, int, int]]:
    own = [(name, 0, 1) for name in (*width.makers, *width.keepers)]
    return own + [(reader.module, 1, reader.repeat) for reader in width.readers]


@contextmanager
def masked(model: nn.Module, windows: Windows, step: int) -> Iterator[dict[str, Tensor]]:
    """Mask what layers take in, scaled as in inverted dropout; yields which entries of each tensor are trained."""
    starts, trained = (
        windows.starts(step),
        {n: torch.ones_like(p) for n, p in model.named_parameters()},
    )
    with ExitStack() as stack:
        for width in windows.widths:
            length, start = windows.length(width), starts[width.name]
            for module, axis, repeat in axes_of(width):
                held = units_of(width, length, start, repeat)
                for name, parameter in model.get_submodule(module).named_parameters(recurse=False):
                    if parameter.dim() > axis:
                        shape = [-1 if a == axis else 1 for a in range(parameter.dim())]
                        trained[f"{module}.{name}"] *= held.reshape(shape)
            for reader in width.readers:
                layer = model.get_submodule(reader.module)
                scale = 1.0 if reader.norm else width.size / length
                mask = units_of(width, length, start, reader.repeat) * scale
                if not isinstance(layer, nn.Linear):
                    mask = mask.reshape(-1, *[1] * (layer.weight.dim() - 2))
                hook = layer.register_forward_pre_hook(lambda _, x, mask=mask: x[0] * mask)
                stack.callback(hook.remove)
        for norm in model.modules():
            if isinstance(norm, BatchNorm) and norm.training and norm.track_running_stats:
                stack.callback(setattr, norm, "track_running_stats", True)
                norm.track_running_stats = False
        yield trained


def slow_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: Windows, step: int, batch: Any
) -> None:
    """A dense step, after which everything outside of the windows is put back, momentum and all."""
    names = {id(p): n for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    known = {
        names[id(p)]: {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        for p, state in optimizer.state.items()
    }
    optimizer.zero_grad()
    with masked(model, windows, step) as trained:
        torch.autograd.backward(compute_loss(model, loss_fn, batch))
    optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            held = trained[name].bool()
            parameter.copy_(torch.where(held, parameter, before[name]))
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    fresh = first_value(optimizer, key, value)
                    old = known.get(name, {}).get(key, fresh)
                    value.copy_(torch.where(held, value, old))


def first_value(optimizer: torch.optim.Optimizer, key: str, value: Tensor) -> Tensor:
    """What an optimiser's state holds before an entry had a gradient."""
    level = {"sum": 0.1, "step_size": 0.01}.get(key, 0.0)
    return torch.full_like(value, level)


def assert_same(
    one: nn.Module, mine: torch.optim.Optimizer, other: nn.Module, theirs: torch.optim.Optimizer
) -> None:
    pairs = list(zip(one.named_parameters(), other.parameters(), strict=True))
    for (name, found), expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=name)
        for key, value in theirs.state.get(expected, {}).items():
            torch.testing.assert_close(
                mine.state[found][key], value, rtol=1e-6, atol=1e-8, msg=f"{key} of {name}"
            )
    for found, expected in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def compare(model: nn.Module, batches: list[Any], windows: Windows, make: Any) -> None:
    model, batches = model.double(), in_double(batches)
    other = copy.deepcopy(model)
    mine, theirs = make(model.parameters()), make(other.parameters())
    before = {name: id(p) for name, p in model.named_parameters()}
    steps = WindowSteps(model, windows)
    for step, batch in enumerate(batches):
        with steps.step(mine, batch):
            mine.zero_grad()
            torch.autograd.backward(compute_loss(model, loss_fn, batch))
            mine.step()
        slow_step(other, theirs, windows, step, batch)
        assert_same(model, mine, other, theirs)
    assert {name: id(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_in_windows_is_the_whole_one_with_the_rest_masked(kind: str, optimizer: str) -> None:
    model = MODELS[kind]()
    batches = data_for(model)
    windows = Windows(widths_of(model, batches[0]), 0.4, seed=7)
    compare(model, batches, windows, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("kind", ["gate", "norms"])
def test_norms_that_are_held_in_eval_use_their_statistics_of_the_window(kind: str) -> None:
    model = MODELS[kind]()
    batches = data_for(model)
    for batch in batches:
        model(batch[0])
    widths = widths_of(model, batches[0])
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()
    wide = tuple(
        Width(**{**vars(w), "readers": tuple(type(r)(r.module, r.repeat) for r in w.readers)})
        for w in widths
    )
    compare(model, batches, Windows(wide, 0.5, seed=1), OPTIMIZERS["momentum"])


@pytest.mark.slow
def test_steps_of_random_models_are_the_whole_ones_with_the_rest_masked() -> None:
    compared = 0
    for seed in range(110):
        drawn = random_model(seed)
        found = trace_step(copy.deepcopy(drawn.model), loss_fn, drawn.batches[0]).graph.widths
        if not found or drawn.is_random:
            continue
        windows = Windows(found, (0.4, 0.5)[seed % 2], seed=seed)
        make = OPTIMIZERS[("sgd", "momentum")[seed % 2]]
        compare(drawn.model, drawn.batches[:2], windows, make)
        compared += 1
    assert compared >= 10


def test_layers_really_are_smaller_and_share_memory() -> None:
    model = perceptron()
    batch = vectors()[0]
    windows = At(widths_of(model, batch), 0.5, start=8)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    whole = model[0].weight
    with WindowSteps(model, windows).step(optimizer, batch):
        assert model[0].weight.shape == (8, 6) and model[2].weight.shape == (4, 8)
        assert model[0].out_features == 8 and model[2].in_features == 8
        assert model[0].weight.data_ptr() == whole[8:].data_ptr()
        assert model[0](batch[0]).shape[1] == 8
    assert model[0].weight is whole and model[0].out_features == 16


def test_an_optimizer_whose_state_has_no_windows_is_refused() -> None:
    class Factored(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = torch.zeros(len(parameter), 7)
            return None

    model, batch = perceptron(), vectors()[0]
    optimizer = Factored(model.parameters(), lr=0.1)
    steps = WindowSteps(model, Windows(widths_of(model, batch), 0.5))
    with pytest.raises(TrainingError, match="keeps 'rows' of shape"), steps.step(optimizer, batch):
        optimizer.step()


class ByConstant(nn.Sequential):
    """Multiplies inner channels by numbers that the graph does not show."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self[0](x))
        return self[1](hidden * torch.arange(1.0, 9.0, dtype=x.dtype))


class BySide(nn.Sequential):
    """Also looks at inner channels in a way that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self[0](x))
        return self[1](hidden) * (1 + hidden.detach().argmax(1, keepdim=True))


@pytest.mark.parametrize("kind", [ByConstant, BySide])
def test_what_the_graph_does_not_show_is_found_out_before_a_step(kind: type[nn.Sequential]) -> None:
    model, batch = kind(nn.Linear(6, 8), nn.Linear(8, 3)), vectors()[0]
    widths = widths_of(model, batch)
    with pytest.raises(PlanError, match="windows of 0 give other outputs"):
        prove_widths(model, widths, batch)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with (
        pytest.raises(PlanError),
        WindowSteps(model, Windows(widths, 0.5)).step(optimizer, batch),
    ):
        pass
    assert model.training and model[0].weight.shape == (8, 6)


WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "mapping": lambda scores: {"of": "scores", "scores": scores},
    "pair": lambda scores: [(None, scores)],
    "object": lambda scores: SimpleNamespace(step=1, scores=scores),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_windows_are_compared_whatever_form_the_outputs_have(wrap: str) -> None:
    for kind in (nn.Sequential, BySide):

        class Wrapped(kind):  # type: ignore[misc,valid-type]
            def forward(self, x: Tensor) -> Any:
                return WRAPPED[wrap](super().forward(x))

        layers, batch = (nn.Linear(6, 8), nn.Linear(8, 3)), vectors()[0]
        widths = widths_of(kind(*layers), batch)
        works = proven_widths(Wrapped(*layers), widths, batch)
        assert works == (widths if kind is nn.Sequential else ())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_few_bits_train_in_windows(kind: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        model = MODELS[kind]().to(dtype)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        x, y = data_for(MODELS[kind]())[0]
        batch = x.to(dtype), y
        widths = widths_of(model, batch)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with WindowSteps(model, Windows(widths, 0.5)).step(optimizer, batch):
            compute_loss(model, loss_fn, batch).backward()
            optimizer.step()
    model, batch = ByConstant(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype), vectors()[0]
    batch = batch[0].to(dtype), batch[1]
    with pytest.raises(PlanError, match="give other outputs"):
        prove_widths(model, widths_of(model, batch), batch)


def test_numbers_of_heads_in_a_models_code_are_found_out() -> None:
    batch = vectors()[0]
    for model, works in ((Heads(), {"query", "mlp.1"}), (Heads(heads=4), {"mlp.1"})):
        widths = widths_of(model, batch)
        assert [(w.name, w.size, w.unit) for w in widths] == [("query", 4, 4), ("mlp.1", 12, 1)]
        assert {width.name for width in proven_widths(model, widths, batch)} == works
    with pytest.raises(PlanError, match="windows of query give other outputs"):
        prove_widths(model, widths, batch)


def test_widths_that_work_alone_and_not_together_are_not_proven() -> None:
    class Compared(nn.Module):
        """Runs as long as one of its two widths is whole."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            self.two = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            if len(self.one[0].weight) + len(self.two[0].weight) < 10:
                raise ValueError("too narrow")
            return self.one(x) + self.two(x)

    model, batch = Compared(), vectors()[0]
    widths = widths_of(model, batch)
    assert len(widths) == 2 and proven_widths(model, widths, batch) == ()
    assert proven_widths(model, widths[:1], batch) == widths[:1]


def test_a_width_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = chain(), vectors()[0]
    widths = widths_of(model, batch)
    prove_widths(model, widths, batch)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    prove_widths(model, widths, batch)
    assert not calls


def test_an_error_inside_a_step_puts_everything_back() -> None:
    model = gate()
    batch = images()[0]
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    driven = [id(p) for group in optimizer.param_groups for p in group["params"]]
    steps = WindowSteps(model, Windows(widths_of(model, batch), 0.5))
    with pytest.raises(ZeroDivisionError), steps.step(optimizer, batch):
        raise ZeroDivisionError
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert driven == [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert tensor_groups(model, loss_fn, batch) and model.norm.track_running_stats
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_windows_held_is_remembered() -> None:
    model = perceptron()
    batches = vectors(3)
    windows = At(widths_of(model, batches[0]), 0.25, start=4)
    steps = WindowSteps(model, windows)
    for batch in batches:
        with steps.step(OPTIMIZERS["sgd"](model.parameters()), batch):
            pass
    rows, columns = steps.held["2.weight"]
    assert np.flatnonzero(rows).tolist() == [4, 5] and np.flatnonzero(columns).tolist() == [
        4,
        5,
        6,
        7,
    ]
    assert np.flatnonzero(steps.held["0.bias"][0]).tolist() == [4, 5, 6, 7]
    assert steps.held["4.weight"][0].all()
