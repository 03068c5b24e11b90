"""What is kept by models that recompute parts of themselves in the backward pass, as by torch.utils.checkpoint."""

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


def saved_by_step(
    run_forward: Callable[[], Trace], model: nn.Module, loss_fn: LossFn, batch: Batch
) -> SavedTensors:
    """Return which tensors each node keeps; recomputed parts count with what they keep while they run again.

    All such parts are counted as if they ran again at the same time, because the graph does not show when they do;
    so a step never takes more than stated. They are examined on a small part of the batch, because the whole batch
    may not fit without recomputation.

    Parameters
    ----------
    run_forward : callable
        Runs a forward pass on ``batch``.
    model, loss_fn, batch
        The model, loss and batch of the training.
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
        # For example if time comes first, and there are as many time steps as examples.
        saved, scale = _without_checkpoints(model, loss_fn, batch), 1.0
    return replace(saved, tensor_bytes=saved.tensor_bytes * scale)


def _without_checkpoints(model: nn.Module, loss_fn: LossFn, batch: Batch) -> SavedTensors:
    with checkpointed_parts(left_out=True) as parts:
        return saved_tensors(lambda: trace_step(model, loss_fn, batch), model, parts)
