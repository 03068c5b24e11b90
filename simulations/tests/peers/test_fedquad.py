"""Activations in bytes: how deep a device trains, what it keeps, and what that does to gradients."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peer_tasks import task_of
from small_models import flat_profile
from torch import Tensor, nn

from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.fedquad import Stretch, deepest, in_bytes_between, with_bytes

_WIDTH, _ROWS = 64, 32


def chain() -> nn.Sequential:
    """Four layers, each of them a block."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, 5))


def batch(rows: int = _ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, _WIDTH, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
    )


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    inputs, targets = batch()
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_gradients_are_nearly_those_of_whole_activations_and_outputs_are_the_same() -> None:
    model = chain()
    exact, outputs = gradients(model), model(batch()[0])
    with in_bytes_between(model, None, None):
        rounded = gradients(model)
        assert torch.equal(model(batch()[0]), outputs)
    assert any(not torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))
    for a, b in zip(exact, rounded, strict=True):
        assert float((a - b).norm()) < 0.02 * float(a.norm())
    assert all(torch.equal(a, b) for a, b in zip(exact, gradients(model), strict=True))


def test_what_is_outside_of_the_stretch_is_kept_as_it_is() -> None:
    model = chain()
    profile = flat_profile(model, batch())
    begin, end, some = Stretch(groups=3, kept_whole=1).ends(profile.graph)
    assert begin is not None and end is not None and some
    kept: list[str] = []

    class Watched(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pack: object, unpack: object) -> None:
            def noted(tensor: Tensor) -> object:
                packed = pack(tensor)  # type: ignore[operator]
                kept.append(type(packed).__name__)
                return packed

            super().__init__(noted, unpack)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", Watched)
        with in_bytes_between(model, begin, end):
            exact = gradients(model)
    assert "_InBytes" in kept and len(exact) == len(list(model.parameters()))
    # The last layer's gradient is of its own input, which is kept whole.
    assert torch.equal(exact[-2], gradients(chain())[-2])
    assert torch.equal(exact[-1], gradients(chain())[-1])


def test_costs_count_a_quarter_of_what_blocks_in_bytes_keep() -> None:
    profile = measured()
    whole = float(profile.node_saved_bytes.sum())
    everything = with_bytes(profile, Stretch(len(profile), 0))
    assert float(everything.node_saved_bytes.sum()) == pytest.approx(whole / 4)
    assert with_bytes(profile, Stretch(len(profile), len(profile))) is profile
    part = with_bytes(profile, Stretch(3, 1))
    assert whole / 4 < float(part.node_saved_bytes.sum()) < whole


def measured() -> CostProfile:
    return profile_model(chain(), nn.functional.cross_entropy, batch(2048))


def test_memory_is_met_by_bytes_first_and_by_depth_then() -> None:
    profile = measured()
    everything = np.ones(len(profile), dtype=bool)
    whole = mask_bytes(profile, everything)
    assert deepest(profile, np.inf, whole) == Stretch(len(profile), len(profile))
    least = mask_bytes(with_bytes(profile, Stretch(len(profile), 0)), everything)
    assert least < whole
    some = deepest(profile, np.inf, (least + whole) / 2)
    assert some.groups == len(profile) and some.kept_whole < len(profile)
    less = deepest(profile, np.inf, least * 0.8)
    assert less.groups < len(profile)
    assert mask_bytes(with_bytes(profile, less), less.mask(profile)) <= least * 0.8
    # One block at the least, whose memory is checked by whoever asks a device to train it.
    assert deepest(profile, 0.0, 0.0) == Stretch(1, 0)
    # Who is only short of time keeps activations as they are.
    assert deepest(profile, 0.0, np.inf) == Stretch(1, 1)


def test_a_device_short_of_memory_trains_deeper_than_with_whole_activations() -> None:
    model = chain()
    task = task_of(model, [batch(2048)] * 2, profile=measured())
    everything = np.ones(len(task.profile), dtype=bool)
    room = mask_bytes(with_bytes(task.profile, Stretch(len(everything), 0)), everything)
    short = replace(task, memory_bytes=room)
    found = PEERS.make("fedquad").train(short).update
    plain = PEERS.make("legend").train(replace(short, model=deepcopy(chain()))).update
    assert len(plain.deltas) < len(found.deltas) == len(list(model.parameters()))
