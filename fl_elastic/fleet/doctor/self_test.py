"""Test whether an installation can train: a tiny model goes through all steps of a round."""

from __future__ import annotations

import time

from fl_elastic.fleet.doctor.finding import Finding, fail, ok

_CLASSES = 4
_SIDE = 12


def self_test() -> Finding:
    """Profile, plan, train, encode, decode and merge once; return a finding with the time taken.

    The model has a convolution, a norm and a linear layer; the data are random. Nothing is left on disk.
    """
    name = "self-test"
    start = time.perf_counter()
    try:
        seen = _one_round()
    except Exception as error:
        # Any problem of an installation may raise here: missing libraries, illegal instructions, bugs.
        return fail(
            name, f"{type(error).__name__}: {error}",
            "create the environment again; if the error stays, report it with: fl-elastic fleet doctor --json",
        )  # fmt: skip
    return ok(name, f"{seen}; {time.perf_counter() - start:.1f} s with imports")


def _one_round() -> str:
    import numpy as np
    import torch
    from torch import nn

    from fl_elastic.aggregation import PartialMean
    from fl_elastic.budget import Budget
    from fl_elastic.training import ElasticTrainer
    from fl_elastic.update import Manifest, decode, encode, weights_of

    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(8, 3, _SIDE, _SIDE, generator=generator),
            torch.randint(0, _CLASSES, (8,), generator=generator),
        )
        for _ in range(4)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, _CLASSES),
    )  # fmt: skip
    manifest = Manifest.of(model)
    before = weights_of(model, manifest)
    trainer = ElasticTrainer(
        model, nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05), budget=Budget(speedup=1.5),
    )  # fmt: skip
    report = trainer.fit(batches, epochs=2)
    data = encode(trainer.update(), manifest)
    mean = PartialMean(manifest)
    mean.add(decode(data, manifest))
    merged = mean.finish(before)
    moved = [key for key, array in merged.items() if not np.array_equal(array, before[key])]
    if not moved or not all(np.isfinite(array).all() for array in merged.values()):
        raise ArithmeticError(
            "training left no trace in the merged model, or one that is not finite"
        )
    return (
        f"trained {len(moved)} of {len(merged)} tensors, "
        f"{report.step_seconds * 1000:.1f} ms per step, {len(data)} bytes sent"
    )
