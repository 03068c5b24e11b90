"""A small model as benchmarks see it: profiled on random images."""

from __future__ import annotations

import torch
from torch import nn

from fl_elastic_simulations.benchmarks.memory import Subject, subject_of


def small_subject() -> Subject:
    """Two blocks of convolutions with norms, and a head; eight images of 16 pixels."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))) for _ in range(2)]
    return subject_of("small", model.train(), batches)
