"""Distil a small backbone from a larger one by its pooled features (KDEP, CVPR 2022); runs can be resumed."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from fl_elastic.errors import ArchiveError, DatasetError, TrainingError
from fl_elastic.groups.forward import channels_last
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive
from fl_elastic_simulations.models.pooled_features import (
    FeaturePlace,
    find_features,
    pooled_features,
)
from fl_elastic_simulations.models.projection import Projection, power_temperature

_PART = Kind("fl_elastic.teacher_part")
_STANDING = Kind("fl_elastic.distillation")
_IMAGES_PER_PART, _TEACHER_BATCH = 512, 64

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """How a student is trained: SGD with momentum, whose learning rate falls to zero along a cosine.

    Learning rate, weight decay and loss weight are those of KDEP for MobileNetV2.

    Parameters
    ----------
    epochs, batch_size : int
        Passes over the images, and images per step.
    learning_rate, weight_decay : float
        Settings of SGD; momentum is 0.9.
    loss_weight : float
        Factor of the mean squared error.
    temperature, power : float
        Parameters of the targets, see `power_temperature`.
    teacher_size : int, optional
        Height and width to which images are enlarged for the teacher only.
    seed : int
        Seed of the order of images.
    """

    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    loss_weight: float = 3.0
    temperature: float = 0.1
    power: float = 3.0
    teacher_size: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Distilled:
    """Result of a distillation.

    Attributes
    ----------
    head : tuple of str
        Tensors of the student that were not trained.
    losses : tuple of float
        Mean squared error of each epoch.
    teacher_width, width : int
        Numbers of features of teacher and student.
    kept_variance : float
        Share of the teacher's variance in the kept directions.
    images : int
        Number of images.
    """

    head: tuple[str, ...]
    losses: tuple[float, ...]
    teacher_width: int
    width: int
    kept_variance: float
    images: int


@dataclass
class _Standing:
    """State of the student's training."""

    path: Path
    student: nn.Module
    optimizer: torch.optim.SGD
    losses: list[float] = field(default_factory=list)

    def save(self) -> None:
        arrays = {f"student/{n}": t.numpy() for n, t in self.student.state_dict().items()}
        for number, parameter in enumerate(self.student.parameters()):
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                arrays[f"momentum/{number}"] = momentum.numpy()
        write_archive(self.path, _STANDING, {"losses": self.losses}, arrays)

    def load(self) -> None:
        found = _kept(self.path, _STANDING)
        if found is None:
            return
        state = {n: torch.from_numpy(a) for n, a in found.under("student/").items()}
        self.student.load_state_dict(state)
        momenta = found.under("momentum/")
        for number, parameter in enumerate(self.student.parameters()):
            if str(number) in momenta:
                momentum = torch.from_numpy(momenta[str(number)])
                self.optimizer.state[parameter]["momentum_buffer"] = momentum
        self.losses = [float(loss) for loss in found.facts["losses"]]


def distil(
    student: nn.Module,
    teacher: nn.Module,
    images: FloatArray,
    recipe: Recipe,
    folder: Path,
    tell: Callable[[str], None] = print,
) -> Distilled:
    """Train a student, in place, to reproduce a teacher's pooled features in their directions of most variance.

    Both see each image and its mirror image. The teacher runs once over all of them, in eval mode. Its features
    and, after each epoch, the student are kept in the folder, from which a later call with the same arguments
    resumes: it gives the same student, bit for bit with the same number of threads. The kept files are removed at
    the end.

    Parameters
    ----------
    student, teacher : nn.Module
        Models that end in a pooling and a linear layer, see `find_features`; on the CPU.
    images : array of float32, shape (n, channels, height, width)
        Images, normalised as both models expect.
    recipe : Recipe
        Settings of the training.
    folder : Path
        Folder for kept files; those of calls with other arguments are not touched.
    tell : callable
        Called with lines that report progress.

    Raises
    ------
    DatasetError
        If the array does not hold images.
    ModelError
        If a model has no pooled features, or the student has more features than the teacher, or than there are
        images.
    TrainingError
        If the loss becomes non-finite; kept files are removed.
    OSError
        If the disk does not take the kept files.
    """
    if images.ndim != 4 or not len(images):
        raise DatasetError(f"inputs of shape {images.shape} are no images to distil from")
    few = torch.from_numpy(images[:2])
    place = find_features(student, few)
    teachers = find_features(teacher, _enlarged(few, recipe.teacher_size))
    own = folder / _fingerprint(student, teacher, images, recipe)
    features = torch.cat(list(_taught(teacher.eval(), teachers, images, recipe, own, tell)))
    projection = Projection.of(features, place.width)
    projected = projection.of_features(features)
    kept = float(
        projected.double().square().sum() / (features - projection.mean).double().square().sum()
    )
    targets = power_temperature(projected, recipe.temperature, recipe.power)
    optimizer = torch.optim.SGD(
        student.parameters(), recipe.learning_rate, momentum=0.9, weight_decay=recipe.weight_decay
    )
    standing = _Standing(own / "student.fle", student, optimizer)
    standing.load()
    if standing.losses:
        tell(f"going on after epoch {len(standing.losses)} of {recipe.epochs}")
    for epoch in range(len(standing.losses), recipe.epochs):
        loss = _epoch(student.train(), place, images, targets, optimizer, recipe, epoch)
        if not math.isfinite(loss):
            shutil.rmtree(own, ignore_errors=True)
            raise TrainingError(
                f"the loss of epoch {epoch + 1} is {loss}: take a learning rate below {recipe.learning_rate:g}"
            )
        standing.losses.append(loss)
        standing.save()
        tell(f"epoch {epoch + 1} of {recipe.epochs}: loss {loss:.4f}")
    shutil.rmtree(own, ignore_errors=True)
    return Distilled(
        place.head, tuple(standing.losses), teachers.width, place.width, kept, len(images)
    )


def _taught(
    teacher: nn.Module,
    place: FeaturePlace,
    images: FloatArray,
    recipe: Recipe,
    folder: Path,
    tell: Callable[[str], None],
) -> Iterator[Tensor]:
    """Yield the teacher's features of images and mirror images, in parts; kept parts are not computed again."""
    for start in range(0, len(images), _IMAGES_PER_PART):
        part = torch.from_numpy(images[start : start + _IMAGES_PER_PART])
        path = folder / f"teacher-{start}.fle"
        kept = _kept(path, _PART)
        if kept is None:
            both = torch.stack([part, part.flip(-1)], 1).flatten(0, 1)
            with torch.no_grad():
                found = torch.cat(
                    [
                        pooled_features(
                            teacher, place, channels_last(_enlarged(some, recipe.teacher_size))
                        )
                        for some in torch.split(both, _TEACHER_BATCH)
                    ]
                )
            write_archive(path, _PART, {}, {"features": found.numpy()})
            kept = Archive({}, {"features": found.numpy()})
            tell(f"teacher: {start + len(part)} of {len(images)} images")
        yield torch.from_numpy(kept.arrays["features"])


def _epoch(
    student: nn.Module,
    place: FeaturePlace,
    images: FloatArray,
    targets: Tensor,
    optimizer: torch.optim.SGD,
    recipe: Recipe,
    epoch: int,
) -> float:
    """Train one epoch, with random numbers that only depend on recipe and epoch; return the mean error."""
    generator = np.random.default_rng([recipe.seed, epoch])
    order = generator.permutation(len(images))
    mirrored = generator.integers(0, 2, len(images))
    steps = max(len(order) // recipe.batch_size, 1)
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        # A student may have layers that draw random numbers.
        torch.default_generator.manual_seed(int(generator.integers(2**62)))
        for step in range(steps):
            rows = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            turned = torch.from_numpy(mirrored[rows])
            inputs = torch.from_numpy(images[rows])
            inputs = torch.where(turned[:, None, None, None] == 1, inputs.flip(-1), inputs)
            done = (epoch * steps + step) / (recipe.epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
            optimizer.zero_grad(set_to_none=True)
            error = mse_loss(
                pooled_features(student, place, channels_last(inputs)),
                targets[2 * torch.from_numpy(rows) + turned],
            )
            (recipe.loss_weight * error).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(error.detach())
    return total / steps


def _enlarged(images: Tensor, size: int | None) -> Tensor:
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    return interpolate(images, (size, size), mode="bilinear", antialias=True)


def _kept(path: Path, kind: Kind) -> Archive | None:
    """Return a kept archive; None if it is missing or damaged, so that it is computed again."""
    try:
        return read_archive(path, kind)
    except (FileNotFoundError, ArchiveError):
        return None


def _fingerprint(student: nn.Module, teacher: nn.Module, images: FloatArray, recipe: Recipe) -> str:
    """Return a name that identifies everything on which the student depends."""
    digest = hashlib.blake2b(f"{recipe}{images.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(images).data)
    for model in (student, teacher):
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()
