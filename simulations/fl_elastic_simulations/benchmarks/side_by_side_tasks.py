"""The tasks on which all methods are compared at one budget, and which methods do not fit which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fl_elastic.named_models import resolve_model
from fl_elastic_simulations.benchmarks.one_budget import METHODS
from fl_elastic_simulations.models.class_token_vit import class_token_vit
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["TASKS", "ComparedTask", "vit_file"]

_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_NO_TOKENS = "tokens are left out of transformers, and this is a convolutional network"
_AUGMENTED = (
    "features that are kept are of the same images in every pass, and pseudo-queries change"
)
_ONE_FIT = "a velocity takes two fits that went before, and an episode is one fit of ten steps"


@dataclass(frozen=True)
class ComparedTask:
    """A task that all methods get.

    Attributes
    ----------
    title : str
        Above its table.
    left_out : mapping of str to str
        Methods that do not fit, each with the reason.
    model : callable, optional
        ``model(classes, seed, data root, folder of weights)`` returns the pretrained network; None for episodes.
    dataset : str
        Of a transfer: that the network is fine-tuned on.
    image_size : int, optional
        To which its images are scaled.
    examples, tested : int, optional
        Of the training and the test set; all if left out.
    passes, rate, head_rate : int, float, float
        Of full training; the rate with which a head alone is trained.
    """

    title: str
    left_out: Mapping[str, str]
    model: Callable[[int, int, str, Path], nn.Module] | None = None
    dataset: str = ""
    image_size: int | None = None
    examples: int | None = None
    tested: int | None = None
    passes: int = 6
    rate: float = 3e-4
    head_rate: float = 1e-3

    @property
    def methods(self) -> list[str]:
        """Names of the methods that fit, in the order of the table."""
        return [name for name in METHODS if name not in self.left_out]


def _pretrained_mobilenet(classes: int, seed: int, root: str, folder: Path) -> nn.Module:
    del seed, folder
    model = resolve_model("mobilenet_v2", classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    return model


def _pretrained_vit(classes: int, seed: int, root: str, folder: Path) -> nn.Module:
    del root
    model = class_token_vit(classes, seed)
    load_pretrained(model, vit_file(folder))
    return model


TASKS: dict[str, ComparedTask] = {
    "birds": ComparedTask(
        "MobileNetV2 to 50 bird species",
        {"bsr": _NO_TOKENS, "e_vit": _NO_TOKENS},
        _pretrained_mobilenet,
        "cub50",
    ),
    "signs": ComparedTask(
        "MobileNetV2, few shots of traffic signs",
        {
            "bsr": _NO_TOKENS, "e_vit": _NO_TOKENS,
            "neq": _ONE_FIT, "velocity": _ONE_FIT, "scotti": _ONE_FIT,
            "head, kept features": _AUGMENTED, "fine_tune": _AUGMENTED,
        },
    ),
    "vit": ComparedTask(
        "a small transformer to clothes",
        {
            "gradient_filter": "gradients of convolutions are filtered, and this has one convolution",
            "tinytrain_learned": "the selector that comes with the library knows MobileNetV2's layers",
        },
        _pretrained_vit,
        "fashion_mnist",
        image_size=32,
        examples=2400,
        tested=2000,
        passes=6,
        rate=1e-3,
        head_rate=3e-2,
    ),
}  # fmt: skip
"""By the name on the command line."""


def vit_file(folder: Path) -> Path:
    """Return where the weights of the transformer are kept."""
    return folder / "vit.npz"
