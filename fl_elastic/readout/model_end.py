"""The end of a model after its last linear layer: a link function, and the shape of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.groups.forward import call_model, scores_of
from fl_elastic.groups.torch_private import version_of

# Link functions by name; the second argument is the axis of the classes.
_LINKS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "log_softmax": torch.log_softmax,
    "softmax": torch.softmax,
    "sigmoid": lambda scores, _: torch.sigmoid(scores),
}
# Rounding of a link function, in machine precisions.
_STEPS = 16


@dataclass(frozen=True)
class ModelEnd:
    """How a model computes its outputs from the output of its last linear layer.

    Attributes
    ----------
    shape : tuple of int or None
        Shape of the outputs, or of the ``logits`` in them; None if there are no scores.
    layer : str
        Name of the linear layer; empty if the outputs are computed in another way.
    link : str
        Name of the link function, such as ``log_softmax``; empty if there is none.
    squeezed : bool
        Whether the axis of a single output is removed, so that outputs have shape (N,).

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.LogSoftmax(dim=1))
    >>> ModelEnd.of(model, torch.zeros(2, 3))
    ModelEnd(shape=(2, 5), layer='2', link='log_softmax', squeezed=False)
    """

    shape: tuple[int, ...] | None
    layer: str = ""
    link: str = ""
    squeezed: bool = False

    @classmethod
    def of(cls, model: nn.Module, inputs: object) -> ModelEnd:
        """Return the end of a model, determined by passes over a few inputs in its present mode."""
        layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        seen: list[tuple[str, Tensor, int | None]] = []
        with torch.no_grad():
            with _outputs_of(layers, lambda name, out: seen.append((name, out, version_of(out)))):
                scores = scores_of(call_model(model, inputs))
            if scores is None:
                return cls(None)
            shape = tuple(scores.shape)
            # A model that changes the output in place returns the same tensor with other numbers.
            names = [n for n, out, version in seen if out is scores and version_of(out) == version]
            if names:
                return cls(shape, names[-1])
            name, out, _ = seen[-1] if seen else ("", scores, None)
            if not name or out.ndim != 2:
                return cls(shape)
            # Run again with known numbers in place of the layer's output, to identify the link function.
            instead = torch.linspace(-2.0, 3.0, out.numel()).to(out).reshape(out.shape)
            version = version_of(instead)
            with _outputs_of({name: layers[name]}, lambda _, __: instead):
                made = scores_of(call_model(model, inputs))
        squeezed = out.shape[1] == 1 and shape == (len(out),)
        kept = made is not None and version_of(instead) == version
        link = link_of(made, instead) if made is not None and kept else None
        if link is None or not (squeezed or shape == tuple(out.shape)):
            return cls(shape)
        return cls(shape, name, link, squeezed)

    def made_of(self, scores: Tensor) -> Tensor:
        """Return the outputs for class scores or numbers of shape (N, C)."""
        outputs = _LINKS[self.link](scores, 1) if self.link else scores
        return outputs.squeeze(1) if self.squeezed else outputs


def link_of(outputs: Tensor, scores: Tensor, axis: int = 1) -> str | None:
    """Return the name of the link function from a layer's scores to the outputs; None if it is not a known one.

    The name is empty if the outputs are the scores, perhaps in another shape or precision. A copy of the scores is
    not recognised, because it may come from a function that happens not to change these scores.

    Parameters
    ----------
    outputs : Tensor
        Outputs of the model, of any shape with as many numbers as the scores.
    scores : Tensor
        Output of the layer.
    axis : int
        The axis of the classes.

    Examples
    --------
    >>> scores = torch.tensor([[1.0], [-2.0]])
    >>> link_of(scores.squeeze(1), scores), link_of(scores.sigmoid(), scores), link_of(2 * scores, scores)
    ('', 'sigmoid', None)
    """
    floats = outputs.is_floating_point() and scores.is_floating_point()
    if outputs.numel() != scores.numel() or not (
        floats and outputs.is_contiguous() and scores.is_contiguous()
    ):
        return None
    if outputs.dtype == scores.dtype and outputs.data_ptr() == scores.data_ptr():
        return ""
    given = outputs.reshape(scores.shape).double()
    rounding = _STEPS * max(torch.finfo(tensor.dtype).eps for tensor in (outputs, scores))
    if outputs.dtype != scores.dtype and torch.allclose(given, scores.double(), rounding, 0.0):
        return ""
    for name, link in _LINKS.items():
        if torch.allclose(given, link(scores, axis).double(), rounding, rounding):
            return name
    return None


@contextmanager
def _outputs_of(layers: Mapping[str, nn.Module], seen: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call a function with the name and output of each of these layers; its result, if any, replaces the output."""
    handles = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen(name, out))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
