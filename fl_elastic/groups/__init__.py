"""Any ``nn.Module`` as tensor groups in backward order, found by walking its autograd graph."""

from fl_elastic.groups.finite import all_finite
from fl_elastic.groups.forward import (
    Batch,
    LossFn,
    batch_shape,
    call_model,
    compute_loss,
    to_device,
)
from fl_elastic.groups.graph import BackwardGraph, BackwardNode, Block, Cut, GroupKind, TensorGroup
from fl_elastic.groups.mode import Axis, Mode
from fl_elastic.groups.trace import Trace, tensor_groups, trace_step
from fl_elastic.groups.untouched import untouched

__all__ = [
    "Axis",
    "BackwardGraph",
    "BackwardNode",
    "Batch",
    "Block",
    "Cut",
    "GroupKind",
    "LossFn",
    "Mode",
    "TensorGroup",
    "Trace",
    "all_finite",
    "batch_shape",
    "call_model",
    "compute_loss",
    "tensor_groups",
    "to_device",
    "trace_step",
    "untouched",
]
