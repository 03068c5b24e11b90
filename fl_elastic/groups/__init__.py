"""Tensor groups of any ``nn.Module`` in backward order, found by walking its autograd graph."""

from typing import TYPE_CHECKING

from fl_elastic.groups.forward import Batch, LossFn
from fl_elastic.groups.graph import TensorGroup
from fl_elastic.groups.mode import Mode
from fl_elastic.lazy_names import loaded_late

if TYPE_CHECKING:
    from fl_elastic.groups.trace import tensor_groups

__all__ = [
    "Batch",
    "LossFn",
    "Mode",
    "TensorGroup",
    "tensor_groups",
]

__getattr__, __dir__ = loaded_late(__name__, {"tensor_groups": "trace"})
