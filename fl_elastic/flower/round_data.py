"""What a client works on for one message: a model with the server's weights, and the batches that meet it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from numpy.typing import NDArray
from torch import nn

from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.groups import Batch, LossFn
from fl_elastic.training import ElasticTrainer, FitReport
from fl_elastic.update import Manifest, PartialUpdate, weights_of

if TYPE_CHECKING:
    from fl_elastic.update.head_sums import HeadSums
    from fl_elastic.update.squared_gradients import SquaredGradients

    Squares: TypeAlias = tuple[SquaredGradients, SquaredGradients | None]

__all__ = ["RoundData"]


@dataclass(frozen=True, eq=False)
class RoundData:
    """Data of a client's loaders. Samples of a stream are `fl_elastic.flower.stream_data.StreamData`.

    Attributes
    ----------
    manifest : Manifest
        Of the server's model.
    model : nn.Module
        What is trained and evaluated.
    batches, tests : iterable of batches
        To train on, and to evaluate on.
    loss_fn : callable
        Of ``batches``.
    """

    manifest: Manifest
    model: nn.Module
    batches: Iterable[Batch]
    tests: Iterable[Batch]
    loss_fn: LossFn

    keeps_features: ClassVar[bool] = False
    """Whether the batches are features already, so that no frozen prefix runs."""
    one_pass: ClassVar[bool] = False
    """Whether a second pass over the batches would meet the same draws."""

    def examples(self, *, of_server: bool = False) -> Iterable[Batch]:
        """Return batches that hold each example once; those of the server's classes alone, if asked for."""
        return self.batches

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the model as the server knows it."""
        return weights_of(self.model, self.manifest, self.manifest.names)

    def update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return what the server is told of a fit that started from this version of its model."""
        return trainer.update(version)

    def known_sums(self) -> HeadSums | None:
        """Return the sums for a head in closed form where they are there without a pass over the examples."""
        return None

    def in_server_order(self, sums: HeadSums) -> HeadSums:
        """Return sums over `examples` of the server's classes for all of the server's outputs."""
        return sums

    def squares(self, compute: Callable[[LossFn], Squares], loss_fn: LossFn) -> Squares:
        """Return squares of gradients by the server's outputs, from what computes them for a loss."""
        return compute(loss_fn)

    def finish(self, task: RoundTask, report: FitReport | None) -> dict[str, Any]:
        """Hand on what a task that succeeded has made; return what the server is told besides."""
        return {}
