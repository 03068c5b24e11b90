"""What models keep that run parts of themselves again on the way back, as by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.torch_private import checkpointed_parts
from fl_elastic.groups.trace import Trace, trace_step
from fl_elastic.profiling.node_timer import saved_tensors
from fl_elastic.profiling.part import part_of
from fl_elastic.profiling.profile import SavedTensors

__all__ = ["saved_by_step"]


def saved_by_step(
    run_forward: Callable[[], Trace], model: nn.Module, loss_fn: LossFn, batch: Batch
) -> SavedTensors:
    """Return which tensors each node keeps; of parts that the model runs again, what they keep while they do.

    All such parts are counted as if they kept it at the same time, so that a step never takes more than is said:
    the graph does not tell when which of them runs again. They are looked at with a small part of the batch,
    because the whole may not fit without running them again.

    Parameters
    ----------
    run_forward : callable
        A forward pass on ``batch``, as it is.
    model, loss_fn, batch
        What is trained.
    """
    with checkpointed_parts(left_out=False) as parts:
        saved = saved_tensors(run_forward, model)
    if not parts:
        return saved
    few, scale = part_of(batch)
    try:
        saved = _without_checkpoints(model, loss_fn, few)
    except TrainingError:
        if few is batch:
            raise
        # As where time comes first, and there are as many steps as examples.
        saved, scale = _without_checkpoints(model, loss_fn, batch), 1.0
    return replace(saved, tensor_bytes=saved.tensor_bytes * scale)


def _without_checkpoints(model: nn.Module, loss_fn: LossFn, batch: Batch) -> SavedTensors:
    with checkpointed_parts(left_out=True) as parts:
        return saved_tensors(lambda: trace_step(model, loss_fn, batch), model, parts)
