"""A small forward pass that determines how many examples suffice, the number of outputs, and the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.batch import batch_size
from fl_elastic.groups.batch_rows import few_of
from fl_elastic.groups.forward import refusing_misfits
from fl_elastic.groups.untouched import untouched
from fl_elastic.readout.model_end import ModelEnd

# Examples that suffice to learn shapes.
_FEW = 2


@dataclass(frozen=True, eq=False)
class FirstPass:
    """The result of a small forward pass in eval mode.

    Attributes
    ----------
    few : tuple
        Inputs and targets of two examples, or of the whole batch if the model does not output one row for each of
        two examples. This happens if time steps come first, or if an input holds the offset of each example.
    end : ModelEnd
        How the model computes its outputs for these examples from the outputs of its last linear layer.
    """

    few: tuple[Any, Any]
    end: ModelEnd

    @classmethod
    def of(cls, model: nn.Module, batch: tuple[Any, Any]) -> FirstPass:
        """Run a pass over some examples of a batch, and return its result; the model is not changed.

        Raises
        ------
        TrainingError
            If the model cannot take the inputs.

        Examples
        --------
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
        >>> found = FirstPass.of(model, (torch.zeros(8, 3), torch.zeros(8)))
        >>> found.few[0].shape, found.outputs, found.end.layer
        (torch.Size([2, 3]), 5, '2')
        """
        with untouched(model), torch.no_grad():
            model.eval()
            few = few_of(batch)
            try:
                if batch_size(batch) > _FEW:
                    end = ModelEnd.of(model, few[0])
                    if end.shape is not None and end.shape[:1] == (batch_size(few),):
                        return cls(few, end)
            # A model may raise any exception on inputs that it does not expect.
            except Exception:
                pass
            with refusing_misfits(batch):
                return cls(batch, ModelEnd.of(model, batch[0]))

    @property
    def why_last(self) -> str:
        """Why a head can read only the input of the last layer; empty if it can read elsewhere."""
        shape = self.end.shape
        if self.end.squeezed or (shape is not None and len(shape) == 2):
            return ""
        given = "no class scores" if shape is None else f"scores of shape {shape}"
        return (
            "a head that reads elsewhere than at the last layer needs a model that gives a row of numbers for each "
            f"example, of shape (N, C); this one gives {given}"
        )

    @property
    def outputs(self) -> int:
        """Number of numbers that the model outputs per example.

        Raises
        ------
        TrainingError
            If the model does not output one row of numbers per example.
        """
        if self.end.shape is None or self.why_last:
            raise TrainingError(
                f"{self.why_last}: read the last layer, or train it without such a head"
            )
        return 1 if self.end.squeezed else self.end.shape[1]
