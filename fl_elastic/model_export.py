"""Export of a trained model to formats that other programs read: safetensors, and, with an extra, ONNX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.groups.untouched import modes_kept
from fl_elastic.state.files import write_atomically
from fl_elastic.update import Manifest, load_weights

_BATCH = 2


def export_model(
    model: nn.Module,
    weights: Mapping[str, NDArray[Any]],
    path: str | os.PathLike[str],
    example: torch.Tensor,
) -> Path:
    """Write a model with these weights to a file in the format given by the file's suffix; return the path.

    Parameters
    ----------
    model : nn.Module
        Model to which the weights belong; they are loaded into it, and its mode stays.
    weights : mapping of str to ndarray
        Weights, for example of a checkpoint.
    path : path-like
        ``*.safetensors`` (weights by their names in ``state_dict``) or ``*.onnx`` (the inference graph, for any
        batch size).
    example : Tensor
        One batch of inputs, from which ONNX takes the sizes other than the batch size.

    Raises
    ------
    ModelError
        If the ending is unknown, the package for it is not installed, or the model cannot be exported.
    """
    target = Path(path)
    load_weights(model, Manifest.fitting(model, weights.keys()), dict(weights))
    if target.suffix == ".safetensors":
        return write_atomically(target, _safetensors(model))
    if target.suffix == ".onnx":
        with modes_kept(model):
            return write_atomically(target, _onnx(model.eval(), example))
    raise ModelError(f"{target.name}: known endings are .safetensors and .onnx")


def _safetensors(model: nn.Module) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError:
        raise ModelError(
            "safetensors is not installed: python -m pip install safetensors"
        ) from None
    # Copied, because the format does not allow two names for one tensor.
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return bytes(save({name: tensor.contiguous() for name, tensor in state.items()}))


def _onnx(model: nn.Module, example: torch.Tensor) -> bytes:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ModelError("onnx is not installed: python -m pip install onnx onnxscript") from None
    # With a batch size of 1, the exporter would treat it as a constant.
    inputs = example[:1].expand(_BATCH, *example.shape[1:]).contiguous()
    batch = torch.export.Dim("batch")
    # By name, because a model may take its inputs as *args, as a readout does.
    given = inspect.signature(model.forward).bind(inputs).arguments
    sizes = {
        name: ({0: batch},) if isinstance(value, tuple) else {0: batch}
        for name, value in given.items()
    }
    try:
        program = torch.onnx.export(
            model, (inputs,), dynamo=True, dynamic_shapes=sizes, verbose=False,
            input_names=["input"], output_names=["output"],
        )  # fmt: skip
    except Exception as error:
        # The exporter has an error class per stage, most of them private.
        raise ModelError(f"this model cannot be exported to ONNX: {error}") from error
    if program is None:
        raise ModelError("this model cannot be exported to ONNX: the exporter returned nothing")
    return bytes(program.model_proto.SerializeToString())
