"""``fl-elastic prepare``: distil a small backbone from a larger one on public images, to initialise a fleet."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fl_elastic.errors import DatasetError, ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fl_elastic_simulations.data.datasets import Inputs

_FOLDER_SIZE = 128
# Classes of weights trained on ImageNet; a teacher with another head is given as module:callable.
_TEACHERS_CLASSES = 1000


def prepare(
    student: Annotated[str, typer.Argument(help="Model that the fleet trains: a name or module:callable.")],
    teacher: Annotated[str, typer.Option(help="Larger model: a name or module:callable.")],
    images: Annotated[str, typer.Option(help="Public images: a dataset's name, or a folder.")],
    output: Annotated[Path, typer.Option(help="File to write.")],
    teacher_weights: Annotated[Path | None, typer.Option(help="File of the teacher's weights.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the datasets.")] = None,
    image_size: Annotated[int | None, typer.Option(min=8, help="Height and width of the images.")] = None,
    teacher_size: Annotated[int | None, typer.Option(min=8, help="Height and width for the teacher alone.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the images that is used.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 30,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per step.")] = 64,
    learning_rate: Annotated[float, typer.Option(min=0, help="Initial learning rate of SGD.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights, the share and the order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    """Distil a small backbone on public images, as the initial model of a fleet.

    After an interruption, the same command resumes.
    """
    from fl_elastic.named_models import build_model
    from fl_elastic.update.backbone import write_backbone
    from fl_elastic_simulations.models.distillation import Recipe, distil
    from fl_elastic_simulations.models.pretrained import load_pretrained

    if teacher_weights is None and (":" not in teacher or teacher.startswith("torchvision:")):
        raise ModelError(
            f"teacher {teacher!r} is built without weights and teaches nothing: give --teacher-weights, or a "
            "module:callable that loads its own"
        )
    inputs, classes = _images(images, data_root, image_size, share, seed)
    shape = tuple(inputs.shape[1:])
    larger = (shape[0], *(teacher_size or side for side in shape[1:]))
    teaching = build_model(teacher, larger, _TEACHERS_CLASSES, seed)
    if teacher_weights is not None:
        load_pretrained(teaching, teacher_weights)
    model = build_model(student, shape, classes, seed)
    recipe = Recipe(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, teacher_size=teacher_size, seed=seed
    )  # fmt: skip
    console = Console(stderr=True)
    tell = console.print
    folder = output.with_name(f".{output.name}.parts")
    found = distil(model, teaching, inputs, recipe, folder, tell)
    facts = {
        "student": student, "teacher": teacher, "images": images, "count": found.images, "input_shape": list(shape),
        "recipe": asdict(recipe), "features": found.width, "teacher_features": found.teacher_width,
        "kept_variance": found.kept_variance, "loss": found.losses[-1],
    }  # fmt: skip
    digest = write_backbone(output, model, found.head, facts)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if as_json:
        typer.echo(json.dumps({**facts, "digest": digest, "output": str(output)}))
    else:
        typer.echo(
            f"{output}: {found.width} features, loss {found.losses[-1]:.4f}, digest {digest}"
        )


def _images(
    name: str, data_root: Path | None, size: int | None, share: float, seed: int
) -> tuple[NDArray[np.float32], int]:
    """Return the images for distillation, and a number of classes for the head, which is not kept."""
    import numpy as np

    from fl_elastic_simulations.data.datasets import load_dataset
    from fl_elastic_simulations.data.image_folder import images_of_folder

    found: Inputs
    if Path(name).is_dir():
        found, classes = images_of_folder(Path(name), size or _FOLDER_SIZE), 2
    else:
        data = load_dataset(name, data_root, size)
        found, classes = data.train_x, data.classes
    if found.ndim != 4:
        raise DatasetError(f"{name}: inputs of shape {found.shape[1:]} are no images")
    count = round(share * len(found))
    if count < 2:
        raise DatasetError(f"a share of {share:g} of {len(found)} images leaves {count}: take more")
    if count == len(found):
        return found[:], classes
    rows = np.random.default_rng(seed).permutation(len(found))[:count]
    return found[np.sort(rows)], classes
