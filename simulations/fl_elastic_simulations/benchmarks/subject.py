"""A model that benchmarks plan for: profiled, scored, and asked for plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import DatasetError
from fl_elastic.groups import Batch
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.planning import POLICIES, Plan, Policy
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.modes import measure_modes
from fl_elastic.training import SelectionState, Timing, TrainerOptions
from fl_elastic.training.planner import Planner
from fl_elastic_simulations.benchmarks.steps import sgd
from fl_elastic_simulations.data.datasets import data_root_folder, load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["Subject", "pretrained_subject", "profiled", "subject"]

_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_CUB_CLASSES = 50


@dataclass
class Subject:
    """A model with batches of one shape, and the costs and scores that were measured on them.

    Attributes
    ----------
    name : str
        A torchvision name.
    model : nn.Module
        In training mode.
    batches : list of batch
        Two independent ones.
    classes : int
        Outputs of the model.
    profile : CostProfile
        Measured with one thread; costs of other modes are added when they are needed.
    states : dict of str to SelectionState
        Scores that were measured, by the name of the importance.
    """

    name: str
    model: nn.Module
    batches: list[Batch]
    classes: int
    profile: CostProfile
    states: dict[str, SelectionState] = field(default_factory=dict)

    @property
    def graph(self) -> BackwardGraph:
        """Groups and nodes of a step."""
        return self.profile.graph

    def planner(self, policy: str | Policy, budget: Budget) -> Planner:
        """Return what asks the policy, with importance, costs of modes and their fidelity measured."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        asked = POLICIES.make(policy)
        importance = asked.needs.own_importance or "elastic"
        options = TrainerOptions(importance=importance, timing=Timing(clock="cpu"))
        state = self.states.setdefault(importance, SelectionState())
        planner = Planner(
            self.model, classification_loss, policy=asked, budget=budget,
            options=options, state=state, optimizer=lambda: sgd(trainable),
        )  # fmt: skip
        self._measure_modes(asked)
        planner.begin(self.profile, 1, self.batches)
        if asked.needs.importance and state.probe_due():
            planner.measure_importance(self.batches)
        else:
            planner.measure_fidelity(self.batches[-1])
        return planner

    def plan(self, policy: str | Policy, budget: Budget) -> Plan:
        """Return the policy's plan; BudgetError if it refuses the budget."""
        return self.planner(policy, budget).plan(1.0)

    def _measure_modes(self, policy: Policy) -> None:
        known = () if self.profile.modes is None else self.profile.modes.modes
        if not set(policy.needs.modes) <= set(known):
            clock = clock_for("cpu", "cpu")
            modes = list(dict.fromkeys([*known, *policy.needs.modes]))
            self.profile = measure_modes(self.profile, self.model, clock, modes)


def subject(name: str, pixels: int, batch_size: int, classes: int = 10) -> Subject:
    """Return a torchvision model with random weights on random images."""
    torch.manual_seed(0)
    model = resolve_model(name, classes).train()
    batches = [
        (torch.randn(batch_size, 3, pixels, pixels), torch.randint(0, classes, (batch_size,)))
        for _ in range(2)
    ]
    return profiled(name, model, batches, classes)


def pretrained_subject(
    pixels: int, batch_size: int, data_root: str | Path | None = None
) -> Subject | None:
    """Return MobileNetV2 with ImageNet weights on images of birds; None if the data is not there."""
    root = data_root_folder(data_root)
    try:
        data = load_dataset("cub50", str(root))
        torch.manual_seed(0)
        model = resolve_model("mobilenet_v2", _CUB_CLASSES).train()
        load_pretrained(model, root / _WEIGHTS)
    except DatasetError:
        return None
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0)).numpy()
    rows = [order[start : start + batch_size] for start in (0, batch_size)]
    batches = [
        (_resized(torch.from_numpy(data.train_x[r]), pixels), torch.from_numpy(data.train_y[r]))
        for r in rows
    ]
    return profiled("mobilenet_v2", model, batches, _CUB_CLASSES)


def profiled(name: str, model: nn.Module, batches: list[Batch], classes: int) -> Subject:
    """Return a model on two batches of images, with its costs measured by the CPU time of one thread."""
    last = torch.channels_last
    batches = [(x.contiguous(memory_format=last), y) for x, y in batches]
    profile = profile_model(model, classification_loss, batches[0], optimizer_fn=sgd, clock="cpu")
    return Subject(name, model, batches, classes, profile)


def _resized(images: torch.Tensor, pixels: int) -> torch.Tensor:
    if images.shape[-1] == pixels:
        return images
    return nn.functional.interpolate(
        images, size=(pixels, pixels), mode="bilinear", antialias=True, align_corners=False
    )
