"""Optimisers as people write them: they take a missing gradient for zeros, or wrap another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


class Zealous(torch.optim.SGD):
    """Takes a missing gradient for zeros: momentum and decay move what has none."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Wraps another and never calls ``Optimizer.__init__``; pulls every weight towards a slow copy."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.calls = 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        found = self.optimizer.step(closure)
        self.calls += 1
        owned = [p for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for parameter, slow in zip(owned, self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return found


class Delegating(torch.optim.Optimizer):
    """Wraps another whose groups and state are its own, as properties."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "zealous": lambda p: Zealous(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "lookahead": lambda p: Lookahead(sgd(p)),
    "delegating": lambda p: Delegating(sgd(p)),
    "lookahead of a zealous one": lambda p: Lookahead(Zealous(p, lr=0.05, weight_decay=0.1)),
}
