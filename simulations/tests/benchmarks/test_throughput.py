"""What the benchmark of client-rounds counts."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_elastic_simulations.benchmarks import throughput
from fl_elastic_simulations.benchmarks.throughput import BENCHMARK, FULL, LOOP, Linear

BURN = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


def test_time_of_other_processes_counts_that_this_one_started() -> None:
    before = throughput._cpu()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        counted = throughput._cpu() - before
        child.communicate(b"\n")
    assert 0.4 < counted < 0.5 + time.process_time()


@pytest.mark.slow
@pytest.mark.parametrize("way", [LOOP, FULL])
def test_each_way_handles_all_client_rounds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(throughput.TASKS["linear"], clients=6, each_round=3, rounds=4)
    monkeypatch.setitem(throughput.TASKS, "linear", small)
    monkeypatch.setattr(throughput, "_WARM", 3)
    throughput._of_task.cache_clear()
    heard: list[int] = []
    original = throughput._Watch.reply
    monkeypatch.setattr(
        throughput._Watch,
        "reply",
        lambda self, received, expected: (
            heard.append(received),
            original(self, received, expected),
        ),
    )
    row = BENCHMARK.run("linear", way)
    assert heard == [1, 2, 3] * 4
    assert row["wall_ms"] > 0 and row["first_reply_seconds"] > 0


@pytest.mark.slow
def test_the_bare_loop_is_plain_sgd() -> None:
    throughput._of_task.cache_clear()
    shared = throughput._of_task("linear")
    start = {name: value.clone() for name, value in shared.model.state_dict().items()}
    found = shared.train(start, 3, 7).state_dict()
    model = Linear()
    model.load_state_dict(start)
    data, task = shared.dataset, shared.task
    mine = slice(3 * task.examples, 4 * task.examples)
    batches = throughput.Batches(
        data.train_x[mine], data.train_y[mine], task.batch, seed=7, steps=task.steps
    )
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= throughput._RATE * gradient
    for name, value in model.state_dict().items():
        assert torch.allclose(value, found[name], atol=1e-6)
