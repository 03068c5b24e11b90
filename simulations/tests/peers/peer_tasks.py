"""Tasks for peers with known costs, and local training written out in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from small_models import Batch, flat_profile, loss_fn
from torch import Tensor, nn

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.peers import LocalResult, LocalTask, Peer

RATE = 0.1


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without momentum, which a test can write out."""
    return torch.optim.SGD(parameters, lr=RATE)


def known_costs(model: nn.Module, batch: Batch) -> CostProfile:
    """Costs of one second per node and gradient; the forward pass takes 2 s, spread over the groups."""
    profile = flat_profile(model, batch)
    share = [1 - cut.groups_above / len(profile) for cut in profile.graph.cuts]
    return replace(
        profile,
        cut_plain_seconds=2.0 * np.array(share),
        cut_inference_seconds=2.0 * np.array(share),
    )


def task_of(model: nn.Module, batches: Sequence[Batch], **settings: Any) -> LocalTask:
    """A task of one epoch with plain SGD and all the time in the world."""
    defaults: dict[str, Any] = {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer_fn": plain_sgd,
        "batches": batches,
        "epochs": 1,
        "allowed_seconds": math.inf,
        "server_round": 1,
        "base_version": 3,
        "clients": 2,
        "client": 0,
        "seed": 5,
    }
    given = defaults | settings
    if "profile" not in given:
        given["profile"] = known_costs(model, batches[0])
    return LocalTask(**given)


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    """All tensors of the model as arrays."""
    return weights_of(model, Manifest.of(model))


def merged(peer: Peer, model: nn.Module, results: Sequence[LocalResult]) -> dict[str, np.ndarray]:
    """The global model after a round, by the peer's own rule."""
    options = MergeOptions(weighting=peer.weighting)
    mean = PartialMean(Manifest.of(model), peer.rule, options=options)
    for result in results:
        mean.add(result.update)
    return mean.finish(weights(model))


def by_hand(
    model: nn.Module, batches: Sequence[Batch], trained: Sequence[str], steps: int
) -> dict[str, Tensor]:
    """Gradient descent on the named tensors of a copy, without an optimiser; returns what they became."""
    copy = deepcopy(model)
    tensors = {name: copy.get_parameter(name) for name in trained}
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(copy(inputs), targets), list(tensors.values())
        )
        with torch.no_grad():
            for tensor, gradient in zip(tensors.values(), gradients, strict=True):
                tensor -= RATE * gradient
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, Any]) -> None:
    """Every tensor named in ``expected`` has that value."""
    assert expected
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], np.asarray(value), rtol=1e-5, atol=1e-7, err_msg=name
        )
