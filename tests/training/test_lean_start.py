"""A process that trains and never compiles does not load the compiler; one that compiles gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys
import torch
from torch import nn
from fl_elastic import Budget, ElasticTrainer
from fl_elastic.training.lean_start import without_compiler

without_compiler()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
trainer = ElasticTrainer(
    model, nn.functional.cross_entropy, lambda p: torch.optim.{optimizer}(p, lr=0.01),
    budget=Budget(speedup=1.3), policy="{policy}")
assert trainer.fit(batches).steps > 0
optimizer = trainer.optimizer
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
"""
NO_COMPILER = """
assert not [name for name in sys.modules if name.startswith("torch._dynamo.") and name != "torch._dynamo.utils"]
"""
ABSENT = f"""{NO_COMPILER}
print(sum(float(p.double().sum()) for p in model.parameters()))
"""
PLAN = """
import sys
from fl_elastic.cli import main
sys.argv = ["fl-elastic", "plan", "torchvision:squeezenet1_1", "--input", "3,32,32"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
"""
NO_MASKED_ARRAYS = """
deep = nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(12)], nn.Linear(64, 3))
trainer = ElasticTrainer(
    deep, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.01), budget=Budget(memory=3e5))
for _ in range(3):
    assert 1 < trainer.fit(batches).plan.mask.sum() < 13
assert "numpy.ma" not in sys.modules
"""
USUAL = "print(sum(float(p.double().sum()) for p in model.parameters()))"
COMPILES = """
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert torch._dynamo.__file__ and "torch._dynamo.eval_frame" in sys.modules
import torch._dynamo.testing
assert torch._dynamo.testing
optimizer.step()
without_compiler()
assert sys.modules["torch._dynamo"].__file__
"""
# Its models ask whether there is a compiler.
TORCHVISION = """
from torchvision.models import mobilenet_v2
from torchvision.ops import roi_align
network = mobilenet_v2(num_classes=3)
torch.optim.SGD(network.parameters(), lr=0.1).step()
boxes = [torch.tensor([[0.0, 0.0, 3.0, 3.0]])]
before = roi_align(torch.arange(16.0).reshape(1, 1, 4, 4), boxes, 2)
utils = sys.modules["torch._dynamo.utils"]
assert not utils.is_compile_supported("cpu")
"""
SAME_BOXES = """
real = sys.modules["torch._dynamo.utils"]
assert real is not utils
assert utils.is_compile_supported("cpu") == real.is_compile_supported("cpu")
assert torch.equal(before, roi_align(torch.arange(16.0).reshape(1, 1, 4, 4), boxes, 2))
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_neither_planning_nor_training_loads_the_compiler() -> None:
    """By none of these: one process takes them one after the other.

    A budget of memory is spent neither on the compiler nor on masked arrays, whoever forgot to do without.
    """
    limited = TRAIN.format(optimizer="SGD", policy="elastic").replace(
        "\nwithout_compiler()\n", "\n"
    )
    pairs = (("SGD", "elastic"), ("Adam", "full"), ("AdamW", "joint"), ("RMSprop", "head"))
    run(
        limited.replace("speedup=1.3", "memory=1e9")
        + ABSENT
        + NO_MASKED_ARRAYS
        + PLAN
        + NO_COMPILER
        + "".join(TRAIN.format(optimizer=each, policy=policy) + ABSENT for each, policy in pairs)
    )


@pytest.mark.slow
def test_whoever_compiles_gets_the_compiler_and_the_same_numbers_with_it() -> None:
    # Without a limit, so that the number of steps is no matter of time.
    script = TRAIN.format(optimizer="Adam", policy="full").replace("speedup=1.3", "")
    # The second time with the compiler that was loaded in between.
    said = run(script + TORCHVISION + ABSENT + COMPILES + SAME_BOXES + script + USUAL)
    without, loaded = said.splitlines()
    assert without == loaded
