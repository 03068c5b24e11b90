"""A stream on an accelerator learns as one on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerator import CPU, DEVICE
from small_models import conv_net
from test_stream_latent import pictures
from toy_streams import blobs, closed, learner_in, net, run, weights

from fl_elastic.streaming import ClosedForm, Latent, Trigger

# Where there is none it is the CPU that is compared with itself.
pytestmark = [] if DEVICE != CPU else [pytest.mark.slow]

STEPS: dict[str, Any] = {
    "encoding": "int8", "steps": 20, "trigger": Trigger(30, None),
    "optimizer_fn": lambda p: torch.optim.SGD(p, lr=0.05),
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [STEPS, STEPS | {"latent": Latent(1)}, STEPS | {"latent": Latent(2)}, {"head": ClosedForm()}],
    ids=["steps", "latent 1", "latent 2", "closed form"],
)
def test_a_stream_there(options: dict[str, Any], tmp_path: Path) -> None:
    ended = {}
    for name, device in {"cpu": CPU, "there": DEVICE}.items():
        torch.manual_seed(0)
        learner = learner_in(tmp_path / name, conv_net().to(device), **options)
        run(learner, pictures(100))
        ended[name] = weights(learner)
        assert learner.progress.adaptations == 3
        assert next(learner.model.parameters()).device.type == torch.device(device).type
        closed(learner)
    assert ended["cpu"].keys() == ended["there"].keys()
    for name, value in ended["cpu"].items():
        np.testing.assert_allclose(ended["there"][name], value, rtol=0.02, atol=0.02)


def test_new_classes_are_learnt_there(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(2).to(DEVICE))
    run(learner, blobs(120, labels=(0, 1)))
    run(learner, blobs(120, labels=(0, 1, 2, 3), seed=1))
    assert len(learner.classes) == 4
    closed(learner)
