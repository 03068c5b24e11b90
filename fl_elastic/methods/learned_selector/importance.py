"""Channel scores by a small pretrained network: Fisher potentials without a backward pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, TrainingError
from fl_elastic.methods.learned_selector.set_summary import FEATURES, LayerSummary, SummaryScore
from fl_elastic.planning.importance.base import IMPORTANCES
from fl_elastic.planning.importance.channels import CHANNEL_SCORES, ChannelScore, ChannelScores
from fl_elastic.planning.importance.fisher import FisherImportance
from fl_elastic.state.archive import Kind, read_archive, write_archive

_KIND = Kind("fl_elastic.selector")
_MOST = 2**24
# Decimal exponent beyond which a prediction cannot be a potential.
_FURTHEST = 30.0
_SHIPPED = Path(__file__).with_name("learned_channels.fle")


@dataclass(frozen=True, eq=False)
class SelectorNetwork:
    """A perceptron that maps a row of a summary to the logarithm (base 10) of a channel's score.

    All channels of all layers share the network, so that it fits any model.

    Attributes
    ----------
    centre, scale : array, shape (F,)
        Mean and scale that standardise the rows.
    weights : sequence of array, shape (out, in)
        Weights of its layers, with ReLU between them.
    biases : sequence of array, shape (out,)
        Biases of its layers.
    """

    centre: NDArray[np.float64]
    scale: NDArray[np.float64]
    weights: Sequence[NDArray[np.float64]]
    biases: Sequence[NDArray[np.float64]]

    def __call__(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the predicted logarithm for each row, shape (n,)."""
        # Clipped to the range of its training data, beyond which its predictions mean nothing.
        found = ((rows - self.centre) / self.scale).clip(-5.0, 5.0).astype(np.float32)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if number:
                np.maximum(found, 0.0, out=found)
            found = found @ weight.T.astype(np.float32)
            found += bias.astype(np.float32)
        return found[:, 0].astype(np.float64)

    def save(self, path: str | os.PathLike[str], facts: Mapping[str, Any] | None = None) -> None:
        """Write the network to a file, with facts about its training, atomically."""
        arrays = {"centre": self.centre, "scale": self.scale}
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays |= {f"weight{number}": weight, f"bias{number}": bias}
        write_archive(path, _KIND, {**(facts or {}), "features": list(FEATURES)}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SelectorNetwork:
        """Read a network that `save` wrote.

        Raises
        ------
        TrainingError
            If the file is missing, damaged, or for other summaries.
        """
        try:
            archive = read_archive(path, _KIND, most=_MOST)
            if archive.facts.get("features") != list(FEATURES):
                raise ArchiveError("it was trained on other summaries")
            own = archive.arrays
            layers = range(sum(name.startswith("weight") for name in own))
            network = cls(
                own["centre"], own["scale"],
                [own[f"weight{number}"] for number in layers], [own[f"bias{number}"] for number in layers],
            )  # fmt: skip
            network._check()
        except (OSError, ArchiveError, KeyError, ValueError) as error:
            raise TrainingError(
                f"selector {path} is not used: {error}; train or fetch it again"
            ) from None
        return network

    def _check(self) -> None:
        """Raise ValueError unless sizes fit each other and numbers are finite."""
        width = len(FEATURES)
        sizes = [self.centre.shape == (width,), self.scale.shape == (width,), bool(self.weights)]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            sizes += [weight.shape == (len(bias), width), bias.shape == (len(bias),)]
            width = len(bias)
        arrays = [self.centre, self.scale, *self.weights, *self.biases]
        if not all(sizes) or width != 1:
            raise ValueError("its layers do not fit together")
        if not all(np.isfinite(each).all() for each in arrays) or (self.scale <= 0).any():
            raise ValueError("it has numbers that are not finite, or a scale that is not positive")


@cache
def _loaded(path: Path) -> SelectorNetwork:
    return SelectorNetwork.load(path)


@CHANNEL_SCORES.register("learned")
class LearnedChannels(SummaryScore):
    """Fisher potentials predicted by a network trained on other data, from one forward pass of a few examples.

    Selectors that look at a set and output a mask were proposed for pruning (STAMP, Song et al., 2020); here the
    output is which channels to train. The shipped network was trained on MobileNetV2 with ImageNet weights and
    subsets of the classes of Fashion-MNIST. For another family of models, train your own network and register a
    class with its path.

    Attributes
    ----------
    path : path-like
        File of the network; your own class sets another one.
    """

    path: ClassVar[str | os.PathLike[str]] = _SHIPPED

    def select(self, summary: Mapping[str, LayerSummary]) -> dict[str, ChannelScores]:
        """Return the predicted potentials; raise TrainingError if the file is not usable."""
        sides = [side for rows in summary.values() for side in (rows.inputs, rows.outputs)]
        if not sides:
            return {}
        # All layers in one call, because most of them have few channels.
        found = _power(_loaded(Path(self.path))(np.concatenate(sides)))
        parts = iter(np.split(found, np.cumsum([len(side) for side in sides])[:-1]))
        return {name: ChannelScores(next(parts), next(parts)) for name in summary}


def _power(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = 10.0 ** logs.clip(-_FURTHEST, _FURTHEST)
    return found


@IMPORTANCES.register("learned")
class LearnedImportance(FisherImportance):
    """Fisher potential of whole layers, as `LearnedChannels` predicts it."""

    def channels(self) -> ChannelScore:
        """Return the channel score that is summed over a layer's output channels."""
        return LearnedChannels()
