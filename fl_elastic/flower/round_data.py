"""What a client works on for one message: a model with the server's weights, and batches for it."""

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
    """Data of a client's loaders; for samples of a stream see `fl_elastic.flower.stream_data.StreamData`.

    Attributes
    ----------
    manifest : Manifest
        Manifest of the server's model.
    model : nn.Module
        The model that is trained and evaluated.
    batches, tests : iterable of batches
        Training and test data.
    loss_fn : callable
        Loss of ``batches``.
    """

    manifest: Manifest
    model: nn.Module
    batches: Iterable[Batch]
    tests: Iterable[Batch]
    loss_fn: LossFn

    keeps_features: ClassVar[bool] = False
    """Whether the batches are features already, so that no frozen prefix runs."""
    one_pass: ClassVar[bool] = False
    """Whether a second pass over the batches would draw the same samples."""

    def examples(self, *, of_server: bool = False) -> Iterable[Batch]:
        """Return batches that hold each example once; ``of_server`` restricts them to the server's classes."""
        return self.batches

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the weights of the model in the server's form."""
        return weights_of(self.model, self.manifest, self.manifest.names)

    def update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return the update of a fit that started from this version of the server's model."""
        return trainer.update(version)

    def known_sums(self) -> HeadSums | None:
        """Return the sums for a head in closed form if they are known without a pass over the examples."""
        return None

    def in_server_order(self, sums: HeadSums) -> HeadSums:
        """Return the sums over `examples` of the server's classes, arranged by the server's outputs."""
        return sums

    def squares(self, compute: Callable[[LossFn], Squares], loss_fn: LossFn) -> Squares:
        """Return squared gradients by the server's outputs; ``compute`` computes them for a loss."""
        return compute(loss_fn)

    def finish(self, task: RoundTask, report: FitReport | None) -> dict[str, Any]:
        """Pass on the result of a successful task; return further metrics for the server."""
        return {}
