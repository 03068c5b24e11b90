"""The tasks on which all methods are compared at one budget, and which methods do not fit which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from fl_elastic.errors import ScenarioError
from fl_elastic.named_models import build_model, check_model_name, resolve_model
from fl_elastic_simulations.benchmarks.one_budget import METHODS
from fl_elastic_simulations.data.datasets import Dataset, check_dataset_name
from fl_elastic_simulations.models.class_token_vit import class_token_vit
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["TASKS", "ComparedTask", "own_task", "vit_file"]

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
        Methods that are known not to fit, each with the reason.
    model : callable, optional
        ``model(data, seed, data root, folder of weights)`` returns the network to begin with; None for episodes.
    dataset : str
        Of a transfer: that the network is fine-tuned on.
    image_size : int, optional
        To which its images are scaled.
    examples, tested : int, optional
        Of the training and the test set; all if left out.
    in_colour : bool
        Whether the network takes images of three channels, also of grey ones.
    batch_size : int
        Examples of a step.
    passes, rate, head_rate : int, float, float
        Of full training; the rate with which a head alone is trained.
    """

    title: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    model: Callable[[Dataset, int, str, Path], nn.Module] | None = None
    dataset: str = ""
    image_size: int | None = None
    examples: int | None = None
    tested: int | None = None
    in_colour: bool = False
    batch_size: int = 16
    passes: int = 6
    rate: float = 3e-4
    head_rate: float = 1e-3

    @property
    def methods(self) -> list[str]:
        """Names of the methods that fit, in the order of the table."""
        return [name for name in METHODS if name not in self.left_out]


def _pretrained_mobilenet(data: Dataset, seed: int, root: str, folder: Path) -> nn.Module:
    del seed, folder
    model = resolve_model("mobilenet_v2", data.classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    return model


def _pretrained_vit(data: Dataset, seed: int, root: str, folder: Path) -> nn.Module:
    del root
    model = class_token_vit(data.classes, seed)
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
        in_colour=True,
        examples=2400,
        tested=2000,
        passes=6,
        rate=1e-3,
        head_rate=3e-2,
    ),
}  # fmt: skip
"""By the name on the command line."""


def _named_model(name: str, data: Dataset, seed: int, root: str, folder: Path) -> nn.Module:
    del root, folder
    return build_model(name, data.input_shape, data.classes, seed)


def own_task(
    model: str,
    dataset: str,
    *,
    image_size: int | None = None,
    batch_size: int = 16,
    passes: int = 6,
    rate: float = 1e-3,
    head_rate: float = 1e-2,
) -> ComparedTask:
    """Return the task of anybody's model on anybody's data; what does not fit it is found out by trying.

    Parameters
    ----------
    model, dataset : str
        Registered names, or ``module:callable``, as a scenario names them; a function of one's own gives the model
        with the weights that training begins with.
    image_size : int, optional
        To which images are scaled.
    batch_size, passes, rate, head_rate
        As `ComparedTask` has them.

    Raises
    ------
    ScenarioError
        If a number is impossible.
    ModelError, RegistryError
        If a name is unknown.
    """
    numbers = {"batch size": batch_size, "passes": passes, "rate": rate, "head rate": head_rate}
    for what, value in numbers.items():
        if not 0 < value < float("inf"):
            raise ScenarioError(f"{what} {value} must be above 0")
    check_model_name(model)
    check_dataset_name(dataset)
    pixels = "" if image_size is None else f" at {image_size} pixels"
    # Cells of other settings are another task's, and so are its costs.
    steps = f"{passes} passes in batches of {batch_size}, rates {rate:g} and {head_rate:g}"
    title = f"{model} on {dataset}{pixels}, {steps}"
    return ComparedTask(
        title, {}, partial(_named_model, model), dataset, image_size,
        batch_size=batch_size, passes=passes, rate=rate, head_rate=head_rate,
    )  # fmt: skip


def vit_file(folder: Path) -> Path:
    """Return where the weights of the transformer are kept."""
    return folder / "vit.npz"
