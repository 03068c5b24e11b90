"""Two steps of one plan in a process of its own, and the most memory that they took.

``python -m fl_elastic_simulations.benchmarks.one_step JOB`` reads a `Job` that this machine pickled and prints the
bytes.
The peak is that of the resident set, above what was resident before the steps: VmHWM, set back just before them
where the kernel permits it, else the largest since the process began.
"""

from __future__ import annotations

import ctypes
import pickle
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import compute_loss
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.training.apply_plan import plan_applied, plan_guards
from fl_elastic_simulations.benchmarks.peak import Job, Peak
from fl_elastic_simulations.benchmarks.steps import sgd

__all__ = ["main", "resident_bytes", "run_job", "set_back_peak"]


def run_job(job: Job) -> Peak:
    """Take two steps in this process, the second with the optimiser's state in place, and return their peak.

    A step on two smaller examples goes before, so that code is loaded and does not count.
    """
    model = resolve_model(job.model, job.classes).train()
    shape = job.batch_shape
    _steps(model, job, _batch((2, *shape[1:]), job.classes), 1)
    batch = _batch(shape, job.classes)
    model.zero_grad(set_to_none=True)
    reset = set_back_peak()
    before = resident_bytes("VmRSS")
    _steps(model, job, batch, 2)
    peak = resident_bytes("VmHWM")
    return Peak(peak - before, reset)


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process; the peak from getrusage without /proc."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run the job that the first argument names."""
    torch.set_num_threads(1)
    peak = run_job(pickle.loads(Path(sys.argv[1]).read_bytes()))
    print(peak.bytes, "reset" if peak.reset else "since start")


def _steps(model: nn.Module, job: Job, batch: Batch, count: int) -> None:
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    with plan_applied(job.plan, model):
        guards = plan_guards(job.plan, model)
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            compute_loss(model, classification_loss, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for guard in guards:
                guard.put_back()


def _batch(shape: tuple[int, ...], classes: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, classes, shape[:1], generator=generator)
    inputs = torch.randn(shape, generator=generator)
    if len(shape) == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs, targets


def set_back_peak() -> bool:
    """Give free memory back and set the peak of the resident set to what is left, where that is permitted."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
