"""What cuts are worth: the same as a slow obvious reference, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import KeptInEval, images, loss_fn, vectors
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.planning.request import STEP_GAIN_EXPONENT
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.training import ForwardOptions, TrainablePart, TrainerOptions
from fl_elastic.training.costs import lasting_costs, with_prefix
from fl_elastic.training.cut_worth import cut_worth

OPTIONS = TrainerOptions(forward=ForwardOptions(feature_bytes=1 << 20))
EXAMPLES = 20


def build(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 8), (8, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def costs(model: nn.Module, batch: Any) -> CostProfile:
    profile = profile_model(model, loss_fn, batch)
    return with_prefix(profile, model, batch, OPTIONS.timing.clock)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.3)


def gains(model: nn.Module, batches: Any, optimizer_fn: Any) -> dict[str, float]:
    """Multiply a copy's step by one batch with another copy's gradient on the other batch."""
    copies = build(), build()
    for each, (inputs, targets) in zip(copies, batches, strict=True):
        each.load_state_dict(model.state_dict())
        each.eval()
        loss_fn(each(inputs), targets).backward()
    optimizer_fn(copies[0].parameters()).step()
    before, one, other = (dict(each.named_parameters()) for each in (model, *copies))
    return {
        name: -float(((one[name] - before[name]) * other[name].grad).sum())  # type: ignore[operator]
        for name in one
    }


@pytest.mark.parametrize("optimizer_fn", [sgd, adamw])
@pytest.mark.parametrize("head", ["", "12"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_gain_above_each_place_for_as_many_steps_as_there_are_in_the_time(
    head: str, seed: int, optimizer_fn: Any
) -> None:
    model, batches = build(seed), images(2, seed=seed)
    profile = costs(model, batches[0])
    options = TrainerOptions(forward=OPTIONS.forward, part=TrainablePart(kept_head=head))
    found = cut_worth(
        model, loss_fn, batches, profile, options, EXAMPLES, optimizer_fn=optimizer_fn
    )
    by_name = gains(model, batches, optimizer_fn)
    assert list(found)[-1] == profile.group_names[-1] and len(found) > 3
    for place, value in found.items():
        above = profile.graph.groups[: profile.graph.groups_above(place)]
        gained = sum(by_name[n] for g in above if g.name != head for n in g.parameters)
        part = TrainerOptions(
            forward=OPTIONS.forward, part=TrainablePart(kept_head=head, cut=place)
        )
        seconds = lasting_costs(profile, part, EXAMPLES).full_step_seconds
        steps = (profile.full_step_seconds / seconds) ** (STEP_GAIN_EXPONENT / 2)
        assert value == pytest.approx(max(gained, 0.0) * steps, rel=1e-3, abs=1e-9)


def test_a_head_that_nobody_trains_is_no_place() -> None:
    model, batches = build(), images(2)
    profile = costs(model, batches[0])
    options = TrainerOptions(forward=OPTIONS.forward, part=TrainablePart(kept_head="12"))
    found = cut_worth(model, loss_fn, batches, profile, options, EXAMPLES, optimizer_fn=sgd)
    assert "12" not in found
    assert "12" in cut_worth(model, loss_fn, batches, profile, OPTIONS, EXAMPLES, optimizer_fn=sgd)


def test_nothing_is_left_of_it() -> None:
    model, batches = build(), images(2)
    profile = costs(model, batches[0])
    model[1].eval()  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    chances = torch.get_rng_state()
    cut_worth(model, loss_fn, batches, profile, OPTIONS, EXAMPLES, optimizer_fn=sgd)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), chances)


def test_what_a_model_keeps_in_eval_mode_is_computed_for_each_batch() -> None:
    """It belongs to the graph of one batch."""
    batches = vectors(2)
    profile = profile_model(KeptInEval(keeps=False), loss_fn, batches[0])
    found, expected = (
        cut_worth(m, loss_fn, batches, profile, TrainerOptions(), EXAMPLES, optimizer_fn=sgd)
        for m in (KeptInEval(keeps=True), KeptInEval(keeps=False))
    )
    assert found == pytest.approx(expected) and max(found.values()) > 0.0


def test_what_tells_nothing_is_worth_nothing() -> None:
    """The upper of two layers stands at its optimum: only what lies below it gains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight.zero_()  # type: ignore[union-attr, operator]
        model[2].bias.zero_()  # type: ignore[union-attr, operator]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs**2).sum() + 0 * targets.sum()

    batches = [(torch.randn(4, 4), torch.zeros(4)) for _ in range(2)]
    profile = profile_model(model, loss, batches[0])
    found = cut_worth(model, loss, batches, profile, TrainerOptions(), EXAMPLES, optimizer_fn=sgd)
    assert set(found.values()) == {0.0}


def test_a_frozen_parameter_stays_frozen_and_a_bad_batch_is_said() -> None:
    model, batches = build(), images(2)
    profile = costs(model, batches[0])
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    cut_worth(model, loss_fn, batches, profile, OPTIONS, EXAMPLES, optimizer_fn=sgd)
    assert not model[0].weight.requires_grad  # type: ignore[union-attr]
    bad = [(torch.full_like(x, float("nan")), y) for x, y in batches]
    with pytest.raises(TrainingError, match="not finite"):
        cut_worth(model, loss_fn, bad, profile, OPTIONS, EXAMPLES, optimizer_fn=sgd)
