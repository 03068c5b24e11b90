"""A model that runs as inference alone gives what it gave, up to rounding, and is left as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_elastic.groups.batch import map_tensors
from fl_elastic.groups.forward import call_model
from fl_elastic.ops.inference import as_inference
from fl_elastic.testing.probes import Snapshot

sys.path.insert(0, str(Path(__file__).parents[1] / "readout"))
from readouts import of_zoo

ROWS = [
    ("vision_models", name)
    for name in ("resnet18", "mobilenet_v3_small", "shufflenet", "densenet", "googlenet_auxiliary_heads", "swin_v2")
] + [("timm_models", name) for name in ("timm_regnet", "timm_efficientnet", "timm_ghostnet")]  # fmt: skip
TARGETS = torch.zeros(4, dtype=torch.long)


def norms_that_have_seen_data(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            size = module.running_mean.shape
            module.running_mean.copy_(torch.randn(size, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(size, generator=generator))
            with torch.no_grad():
                module.weight.copy_(0.5 + torch.rand(size, generator=generator))
                module.bias.copy_(torch.randn(size, generator=generator))
    return model.eval()


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.no_grad():
        map_tensors(lambda tensor: found.append(tensor) or tensor, call_model(model, inputs))
    return found


@pytest.mark.parametrize(("module", "name"), ROWS)
def test_outputs_are_the_same_up_to_rounding_and_nothing_stays(module: str, name: str) -> None:
    if module == "timm_models":
        pytest.importorskip("timm")
    model, inputs = of_zoo(module, name)
    norms_that_have_seen_data(model)
    expected = outputs(model, inputs)
    before = Snapshot(model)
    with as_inference(model, (inputs, TARGETS)) as lay_out:
        found = outputs(model, lay_out(inputs))
    assert before.differences() == []
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3 * float(two.abs().max()))
    for one, two in zip(outputs(model, inputs), expected, strict=True):
        assert torch.equal(one, two)


def test_norms_do_not_run_where_they_are_folded() -> None:
    model, inputs = of_zoo("vision_models", "resnet18")
    norms_that_have_seen_data(model)
    with as_inference(model, (inputs, TARGETS)):
        folded = [m for m in model.modules() if "forward" in vars(m)]
    assert len(folded) == 2 * 20
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_convolution_that_is_looked_at_gives_its_own_output() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    norms_that_have_seen_data(model)
    inputs, seen = torch.randn(4, 3, 8, 8), []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    model(inputs)
    with as_inference(model, (inputs, TARGETS), read={"0"}) as lay_out:
        model(lay_out(inputs))
    torch.testing.assert_close(seen[-1], seen[0], rtol=1e-5, atol=1e-5)
    with as_inference(model, (inputs, TARGETS)) as lay_out:
        model(lay_out(inputs))
    assert not torch.allclose(seen[-1], seen[0], atol=1e-2)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_where_the_body_raises(error: type[BaseException]) -> None:
    model, inputs = of_zoo("vision_models", "mobilenet_v3_small")
    norms_that_have_seen_data(model)
    before = Snapshot(model)
    with pytest.raises(error), as_inference(model, (inputs, TARGETS)):
        raise error
    assert before.differences() == []


def test_a_forward_that_somebody_set_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    norms_that_have_seen_data(model)
    own = model[0].forward
    model[0].forward = lambda given: own(given) + 1  # type: ignore[method-assign]
    inputs = torch.randn(4, 3, 8, 8)
    expected, set_before = model(inputs), model[0].__dict__["forward"]
    with as_inference(model, (inputs, TARGETS)):
        torch.testing.assert_close(model(inputs), expected)
    assert model[0].__dict__["forward"] is set_before


def test_a_model_that_cannot_be_traced_runs_as_it_is() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> str:
            return str(self.norm(x).shape)

    model, inputs = Odd().eval(), torch.randn(4, 3, 8, 8)
    before = Snapshot(model)
    with as_inference(model, (inputs, TARGETS)) as lay_out:
        assert model(lay_out(inputs)) == str(inputs.shape)
    assert before.differences() == []


def test_nothing_is_folded_where_another_batch_may_take_another_way() -> None:
    class TwoWays(nn.Module):
        """Past its norm for some batches, and through another layer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.other = nn.Conv2d(4, 4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            found = self.layer(inputs)
            found = self.norm(found) if inputs.sum() > 0 else self.other(found)
            return found.mean(dim=(2, 3))

    torch.manual_seed(0)
    model = TwoWays()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    model.eval()
    one, two = torch.ones(2, 1, 6, 6), -torch.ones(2, 1, 6, 6)
    with torch.no_grad():
        expected = model(one), model(two)
        with as_inference(model, (one, torch.zeros(2, dtype=torch.long))):
            found = model(one), model(two)
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain)
