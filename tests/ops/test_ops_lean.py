"""A lean run of a model: the loss and gradients of plain PyTorch from fewer kept bytes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from kept_bytes import kept_bytes
from lean_models import mobile, resnet, settled
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.ops.lean import lean

MODELS = {"resnet": resnet, "mobile": mobile, "hardswish": lambda: mobile(nn.Hardswish)}
Modes = Mapping[str, Mode]
Channels = Mapping[str, Sequence[int]]


def batch(order: torch.memory_format = torch.channels_last) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return images.contiguous(memory_format=order), torch.tensor([0, 1, 2, 3])


def step(model: nn.Module, order: torch.memory_format) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of everything that has one."""
    model.zero_grad()
    inputs, targets = batch(order)
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def train(model: nn.Module, modes: Modes) -> None:
    """Let what ``modes`` trains require a gradient."""
    for name, module in model.named_modules():
        mode = modes.get(name, Mode.FROZEN)
        for own, parameter in module.named_parameters(recurse=False):
            trained = own == "bias" if mode.kind == "bias" else not mode.is_frozen
            parameter.requires_grad_(trained)


PLANS: dict[str, dict[str, Mode]] = {
    "resnet": {
        "0": Mode.BIAS, "4.conv1": Mode.FULL, "4.bn1": Mode.FULL, "4.conv2": Mode.FROZEN,
        "5.short.0": Mode.channels(0.25, "in"), "5.conv2": Mode.channels(0.5, "out"), "6.bn2": Mode.BIAS,
        "9": Mode.channels(0.5, "in"),
    },
    "mobile": {
        "3.layers.0": Mode.channels(0.5, "out"), "3.layers.3": Mode.channels(0.25, "in"),
        "4.layers.4": Mode.FULL, "4.layers.6": Mode.BIAS, "5.layers.6": Mode.FULL, "8": Mode.BIAS,
    },
    "hardswish": {"3.layers.0": Mode.channels(0.5, "in"), "8": Mode.FULL},
}  # fmt: skip
CHANNELS: dict[str, dict[str, list[int]]] = {
    "resnet": {"5.short.0": [1, 6], "5.conv2": [0, 4, 5, 7, 9, 11], "9": [1, 2, 3, 5, 7, 11]},
    "mobile": {"3.layers.0": [0, 2, 4, 23], "3.layers.3": [1, 5, 9, 20, 21, 22]},
    "hardswish": {"3.layers.0": [3, 5, 6, 7]},
}


def channel_mask(shape: torch.Size, mode: Mode, listed: Sequence[int]) -> Tensor:
    """Ones at the weights of the listed channels; a depthwise weight has its channels as rows."""
    mask = torch.zeros(shape)
    if mode.axis == "in" and shape[1] > 1:
        mask[:, listed] = 1
    else:
        mask[listed] = 1
    return mask


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_loss_and_gradients_are_those_of_plain_torch(name: str, order: torch.memory_format) -> None:
    model = settled(MODELS[name]()).to(memory_format=order)
    modes, channels = PLANS[name], CHANNELS[name]
    train(model, modes)
    loss, expected = step(model, order)
    with lean(model, modes, channels):
        lean_loss, found = step(model, order)
    assert torch.equal(lean_loss, loss)
    assert set(found) == set(expected)
    for parameter, gradient in expected.items():
        owner, _, own = parameter.rpartition(".")
        mode = modes[owner]
        if mode.kind == "channels" and own == "weight":
            gradient = gradient * channel_mask(gradient.shape, mode, channels[owner])
        torch.testing.assert_close(found[parameter], gradient, rtol=2e-4, atol=1e-6)
    again, after = step(model, order)
    assert torch.equal(again, loss)
    for parameter, gradient in expected.items():
        assert torch.equal(after[parameter], gradient)


@pytest.mark.parametrize("inputs", [False, True])
def test_filtered_modes_leave_the_loss_alone(inputs: bool) -> None:
    model = settled(resnet()).to(memory_format=torch.channels_last)
    modes = {"6.conv1": Mode.filtered(2, inputs=inputs), "6.conv2": Mode.filtered(2, inputs=inputs)}
    train(model, modes)
    loss, expected = step(model, torch.channels_last)
    with lean(model, modes):
        lean_loss, found = step(model, torch.channels_last)
    assert torch.equal(lean_loss, loss)
    for name, gradient in found.items():
        cosine = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert 0.5 < cosine < 0.9999


def test_a_frozen_chain_keeps_bits_and_scales_only() -> None:
    model = settled(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    )
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    plain = kept_bytes(lambda: model(x), besides=model)
    with lean(model, {}):
        kept = kept_bytes(lambda: model(x), besides=model)
    bits, scales = 2 * 8 * 8 * 8 // 8, 8 * 4
    assert kept == bits + scales
    assert plain > 20 * kept


def forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_the_model_is_as_before_after_an_exception() -> None:
    model = settled(resnet())
    state = copy.deepcopy(model.state_dict())
    before = pickle.dumps(model)
    with pytest.raises(KeyError), lean(model, {"6.conv1": Mode.FROZEN}):
        assert "6.conv1" in forwards(model)
        assert "6.relu" in forwards(model)
        raise KeyError
    assert forwards(model) == []
    assert pickle.dumps(model) == before
    assert list(model.state_dict()) == list(state)


def test_nothing_is_replaced_when_the_plan_is_refused() -> None:
    model = settled(resnet())
    with pytest.raises(PlanError), lean(model, {"6.conv1": Mode.channels(0.5)}, {"6.conv1": [99]}):
        pass
    assert forwards(model) == []


def test_a_copy_made_inside_runs_its_own_layers() -> None:
    model = settled(resnet())
    x, _ = batch()
    x.requires_grad_()
    with lean(model, {}):
        twin = copy.deepcopy(model)
        thawed: nn.Module = pickle.loads(pickle.dumps(model))
    for other in (twin, thawed):
        for parameter in other.parameters():
            parameter.data.zero_()
        assert not other(x).any()
    assert model(x).any()


def test_the_inner_of_two_blocks_counts() -> None:
    model = settled(mobile())
    train(model, {"8": Mode.FULL, "3.layers.0": Mode.FULL})
    conv = model.get_submodule("3.layers.0")
    inputs, _ = batch()

    def gradient() -> bool:
        model.zero_grad()
        model(inputs).sum().backward()
        return isinstance(conv.weight.grad, Tensor)

    with lean(model, {"3.layers.0": Mode.BIAS}):
        assert not gradient()
        with lean(model, {"3.layers.0": Mode.FULL}):
            assert gradient()
            assert "5.layers.2" in forwards(model)
        assert not gradient()
    assert gradient()
    assert forwards(model) == []


def test_a_forward_of_somebody_else_is_left_alone() -> None:
    model = settled(mobile())
    theirs: Callable[[Tensor], Tensor] = torch.sigmoid
    model[2].__dict__["forward"] = theirs
    with lean(model, {}):
        assert model[2].__dict__["forward"] is theirs
        assert forwards(model)[:2] == ["0", "1"]
    assert model[2].__dict__["forward"] is theirs


def test_what_is_trained_later_runs_plain_and_without_gradients_too() -> None:
    model = settled(mobile())
    norm = model.get_submodule("3.layers.1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    inputs, _ = batch()
    inputs.requires_grad_()
    with lean(model, {}):
        norm.train()
        before = norm.running_mean.clone()
        model(inputs)
        assert not torch.equal(norm.running_mean, before)
        norm.eval().requires_grad_(True)
        model(inputs).sum().backward()
        assert norm.weight.grad is not None
        with torch.no_grad():
            assert model(inputs).grad_fn is None


def test_under_autocast_it_runs_plain() -> None:
    model = settled(mobile())
    inputs, _ = batch()

    def found() -> tuple[Tensor, Tensor]:
        leaf = inputs.clone().requires_grad_()
        output = model(leaf)
        output.sum().backward()
        assert leaf.grad is not None
        return output, leaf.grad

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = found()
        with lean(model, {}):
            ours = found()
    assert ours[0].dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("modes", "channels", "said"),
    [
        ({"nothing": Mode.FULL}, {}, "'nothing' is not in the model"),
        ({}, {"nothing": [0]}, "'nothing' is not in the model"),
        ({"0": Mode.channels(0.5)}, {"0": []}, r"'0': no channels .*0\.\.2"),
        ({"0": Mode.channels(0.5)}, {"0": [3]}, r"'0': channel 3 .*0\.\.2"),
        ({"0": Mode.channels(0.5, "out")}, {"0": [-1]}, r"'0': channel -1 .*0\.\.7"),
        ({"9": Mode.channels(0.5)}, {}, r"'9': mode in/2 needs the channels"),
    ],
)
def test_refusals_name_the_layer_and_the_range(modes: Modes, channels: Channels, said: str) -> None:
    with pytest.raises(PlanError, match=said), lean(resnet(), modes, channels):
        pass
