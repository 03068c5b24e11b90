"""Recipes for training batches from new and stored samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fl_elastic.errors import ModelError, StreamError
from fl_elastic.groups import LossFn
from fl_elastic.registry import Factories
from fl_elastic.streaming.retrievals import RETRIEVALS

__all__ = ["REPLAYS", "DarkReplay", "ExperienceReplay", "Part", "Replay"]


@dataclass(frozen=True)
class Part:
    """Some rows of each batch.

    Parameters
    ----------
    rows : int
        How many.
    stored : bool
        Out of the store rather than from the new samples.
    weight : float
        Of the mean loss over these rows.
    distils : bool
        Whether they are held to what the model said of them, rather than to their labels.
    """

    rows: int
    stored: bool
    weight: float = 1.0
    distils: bool = False


class Replay(ABC):
    """A recipe for batches, and the loss that goes with it."""

    how: str = "uniform"

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """What each batch consists of, in this order."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch, always the same."""
        return sum(part.rows for part in self.parts)

    @property
    def needs_outputs(self) -> bool:
        """Whether the store must keep what the model said of a sample."""
        return any(part.distils for part in self.parts)

    def targets(self, outputs: Tensor, told: Tensor | None) -> Any:
        """Return the targets of a batch.

        Parameters
        ----------
        outputs : Tensor of int, shape (B,)
            The right output of each row.
        told : Tensor or None, shape (B, C)
            What the model said of each row, NaN where that is not known; None unless it is needed.
        """
        del told
        return outputs

    def loss(self, loss_fn: LossFn) -> LossFn:
        """Return the loss of a whole batch, from the one of rows with labels."""
        return loss_fn


REPLAYS: Factories[Replay] = Factories("replay")
"""Kinds of replay by name, each as it is by default."""


@dataclass(frozen=True)
class ExperienceReplay(Replay):
    """New and stored samples side by side in each batch (Chaudhry et al. 2019, "tiny episodic memories").

    Parameters
    ----------
    rows : int
        Rows of a batch.
    stored_share : float
        Share of them that comes out of the store, from 0 to 1.
    how : str
        Registered retrieval.

    Examples
    --------
    >>> ExperienceReplay(8, stored_share=0.25).parts
    (Part(rows=6, stored=False, weight=1.0, distils=False), Part(rows=2, stored=True, weight=1.0, distils=False))
    """

    rows: int = 32
    stored_share: float = 0.5
    how: str = "uniform"

    def __post_init__(self) -> None:
        _check(self.rows, self.how)
        if not 0 <= self.stored_share <= 1:
            raise StreamError(f"a stored share of {self.stored_share} is not between 0 and 1")

    @property
    def parts(self) -> tuple[Part, ...]:
        """New rows, then stored ones."""
        stored = round(self.rows * self.stored_share)
        rows = ((self.rows - stored, False), (stored, True))
        return tuple(Part(count, of_store) for count, of_store in rows if count)


@dataclass(frozen=True)
class DarkReplay(Replay):
    """DER++ (Buzzega et al., NeurIPS 2020): stored samples are held to what the model once said of them.

    The loss is that of new rows, plus ``alpha`` times the mean squared difference between the model's scores and
    those it gave when the sample came, plus ``beta`` times the loss of a second draw by its labels. Of a sample
    that came when there were fewer classes only those are compared; one whose scores are not known counts nothing
    in the first draw.

    Parameters
    ----------
    rows : int
        New rows, and rows of each of the two draws.
    alpha, beta : float
        Weights of the two draws.
    how : str
        Registered retrieval of both.
    """

    rows: int = 16
    alpha: float = 0.3
    beta: float = 0.5
    how: str = "uniform"

    def __post_init__(self) -> None:
        _check(self.rows, self.how)
        if not (0 < self.alpha < float("inf") and 0 <= self.beta < float("inf")):
            raise StreamError(
                f"alpha {self.alpha} and beta {self.beta} must be positive: use the replay 'er' without them"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """New rows, those held to old scores, those held to labels."""
        return (
            Part(self.rows, stored=False),
            Part(self.rows, stored=True, weight=self.alpha, distils=True),
            Part(self.rows, stored=True, weight=self.beta),
        )

    def targets(self, outputs: Tensor, told: Tensor | None) -> dict[str, Tensor]:
        """Return right outputs, old scores, and to which part each row belongs."""
        if told is None:
            raise StreamError("the old scores of the rows are missing: store them with each sample")
        counts = torch.tensor([part.rows for part in self.parts])
        return {
            "outputs": outputs,
            "told": told,
            "part": torch.repeat_interleave(torch.arange(len(counts)), counts),
        }

    def loss(self, loss_fn: LossFn) -> LossFn:
        """Return the sum over the parts."""

        def dark_loss(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
            if not isinstance(outputs, Tensor) or outputs.ndim != 2:
                raise ModelError("DER++ needs one table of class scores as the model's output")
            total = outputs.sum() * 0.0
            for index, part in enumerate(self.parts):
                mine = targets["part"] == index
                if not mine.any():
                    continue
                told = targets["told"][mine]
                own = (
                    _distance(outputs[mine], told)
                    if part.distils
                    else loss_fn(outputs[mine], targets["outputs"][mine])
                )
                # By its share of the rows, so that the mean over single rows is that over the whole batch.
                share = mine.sum() / len(mine) * (self.batch_size / part.rows)
                total = total + part.weight * share * own
            return total

        return dark_loss


def _distance(outputs: Tensor, told: Tensor) -> Tensor:
    """Return the mean squared difference where ``told`` is known; 0 if it is nowhere."""
    told = told[:, : outputs.shape[1]].to(outputs)
    known = torch.isfinite(told)
    if not known.any():
        return outputs.sum() * 0.0
    return mse_loss(outputs[:, : told.shape[1]][known], told[known])


def _check(rows: int, how: str) -> None:
    if rows < 1:
        raise StreamError(f"a batch of {rows} rows means nothing: give at least 1")
    RETRIEVALS.get(how)


@REPLAYS.register("none")
def new_samples_only() -> Replay:
    """Return the recipe without replay: the model forgets what does not come again."""
    return ExperienceReplay(stored_share=0.0)


REPLAYS.register("er")(ExperienceReplay)
REPLAYS.register("der_pp")(DarkReplay)
