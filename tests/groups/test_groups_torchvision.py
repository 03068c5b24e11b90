"""Tensor groups of torchvision's classification models: no code knows any of them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fl_elastic.groups import Batch
from fl_elastic.groups.trace import trace_step
from fl_elastic.losses import classification_loss
from fl_elastic.testing.probes import Snapshot

FAST = ["resnet18", "swin_t", "shufflenet_v2_x0_5"]
# The smallest input that works, where 64 pixels do not.
PIXELS = {"inception_v3": 299, "maxvit_t": 224}
LARGEST = 135_000_000
# A network of its own beside the path (Swin V2's positions) stands where it joins, but runs later.
OFF_THE_PATH = "cpb_mlp"


def classification_models() -> list[str]:
    return [str(name) for name in torchvision.models.list_models(module=torchvision.models)]


def weights_count(name: str) -> int:
    weights = torchvision.models.get_model_weights(name)
    return int(next(iter(weights)).meta["num_params"])


def build(name: str) -> tuple[nn.Module, Batch]:
    pixels = PIXELS.get(name, 64)
    settings: dict[str, Any] = {"num_classes": 5}
    if name.startswith("vit_"):
        settings["image_size"] = pixels = 2 * int(name.rsplit("_", 1)[1])
    if name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torchvision.models.get_model(name, **settings)
    # Running without dropout: both traced and real step then use the same parameters.
    for module in model.modules():
        if "Dropout" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            module.eval()
    return model, (torch.randn(2, 3, pixels, pixels), torch.tensor([0, 3]))


def check_groups(name: str) -> None:
    model, batch = build(name)
    before = Snapshot(model)
    random_state = torch.get_rng_state()
    graph = trace_step(model, classification_loss, batch).graph
    torch.set_rng_state(random_state)
    changed = [what for what in before.differences() if not what.startswith("buffer")]
    assert changed == []
    arrived: list[str] = []

    def note(parameter_name: str, _: Tensor) -> None:
        arrived.append(parameter_name)

    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, parameter_name))  # type: ignore[no-untyped-call]
    torch.autograd.backward(classification_loss(model(batch[0]), batch[1]))
    grouped = [p for group in graph.groups for p in group.parameters]
    assert sorted(grouped) == sorted(arrived)
    place = {parameter_name: index for index, parameter_name in enumerate(arrived)}
    complete = [
        max(place[p] for p in group.parameters)
        for group in graph.groups
        if not group.name.endswith(OFF_THE_PATH)
    ]
    assert complete == sorted(complete)
    assert len({group.name for group in graph.groups}) == len(graph.groups)
    assert all(graph.group_nodes())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_groups_of_a_torchvision_model(name: str) -> None:
    check_groups(name)


def test_the_list_of_models_is_not_empty() -> None:
    assert len(classification_models()) >= 75
    assert set(FAST) <= set(classification_models())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(classification_models()) - set(FAST)))
def test_groups_of_every_other_torchvision_model(name: str) -> None:
    if weights_count(name) > LARGEST:
        pytest.skip(f"{name} has {weights_count(name) / 1e6:.0f} million weights")
    check_groups(name)
