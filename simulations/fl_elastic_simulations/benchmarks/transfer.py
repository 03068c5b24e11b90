"""Common parts of fine-tuning benchmarks: a pretrained network, shuffled batches, an optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.named_models import model_builder
from fl_elastic_simulations.models.pretrained import load_pretrained

WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
"""File of MobileNetV2's ImageNet weights in the data folder."""


def pretrained_mobilenet(root: str | Path, classes: int) -> nn.Module:
    """Return MobileNetV2 with a new head and the ImageNet weights in the data folder."""
    model = model_builder("mobilenet_v2", classes)()
    load_pretrained(model, Path(root) / WEIGHTS)
    return model


class Shuffled:
    """Batches of a dataset in a new order in each epoch, reproducible from a seed, in channels-last format.

    The last batch is left out if it is incomplete.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int, seed: int) -> None:
        self._inputs, self._targets, self._size = inputs, targets, batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self.dataset_size = len(inputs)

    def __len__(self) -> int:
        return len(self._inputs) // self._size

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self._inputs), generator=self._generator)
        for index in range(len(self)):
            rows = order[index * self._size : (index + 1) * self._size]
            yield channels_last(self._inputs[rows]), self._targets[rows]


def cosine_adamw(rate: float, steps: int) -> Callable[[Iterable[nn.Parameter]], torch.optim.AdamW]:
    """Return a factory of AdamW whose learning rate falls to zero along a cosine within ``steps`` steps."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(parameters, lr=rate)
        taken = 0

        def lower(*_: Any) -> None:
            nonlocal taken
            taken += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * min(taken / steps, 1.0)))

        optimizer.register_step_post_hook(lower)
        return optimizer

    return make
