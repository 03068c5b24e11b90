"""What the method changes about the steps themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from fl_elastic.planning import Plan
from fl_elastic.planning.step_transform import StepTransform


@dataclass(frozen=True)
class RestingDropout(StepTransform):
    """Drop nothing out inside of modules of which nothing is trained; afterwards the model is as before."""

    @contextmanager
    def applied(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        """Set the probability of such layers to zero inside the block."""
        trained = set(plan.trained_parameters)
        before: list[tuple[nn.Dropout, float]] = []
        for prefix, module in model.named_modules():
            own = {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()}
            if own and trained.isdisjoint(own):
                for inner in module.modules():
                    if isinstance(inner, nn.Dropout):
                        before.append((inner, inner.p))
                        inner.p = 0.0
        try:
            yield
        finally:
            for layer, probability in reversed(before):
                layer.p = probability
