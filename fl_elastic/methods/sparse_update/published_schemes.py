"""The fifteen update schemes that tiny-training published, with the shapes of their three models.

Shapes and indices are from "On-Device Training Under 256KB Memory" (Lin et al., NeurIPS 2022) and its repository;
published figures can be checked against them. Convolutions are counted from the input, with the stem as 0; the
classifier is not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.profiling.layer_shapes import LayerShape


@dataclass(frozen=True)
class LayerUpdate:
    """Which part of one layer is trained.

    Attributes
    ----------
    fraction : float
        Share of the input channels whose weights are trained; 0 for none.
    bias : bool
        Whether the bias is trained.
    """

    fraction: float = 0.0
    bias: bool = False


@dataclass(frozen=True)
class Scheme:
    """Which layers, counted from the input, are trained besides the classifier.

    Attributes
    ----------
    bias_layers : int
        Number of layers next to the classifier whose bias is trained.
    weights : tuple of (int, float)
        Layers whose weights are trained, with the share of their input channels.
    kilobytes : int
        The published label; 0 for a scheme that was not published.
    """

    bias_layers: int
    weights: tuple[tuple[int, float], ...] = ()
    kilobytes: int = 0

    def updates(self, layers: int) -> list[LayerUpdate]:
        """Return what is trained of each of ``layers`` layers."""
        shares = dict(self.weights)
        return [
            LayerUpdate(shares.get(index, 0.0), bias=index >= layers - self.bias_layers)
            for index in range(layers)
        ]


@dataclass(frozen=True)
class PublishedModel:
    """One of the three published models, at an input of 128 x 128.

    Attributes
    ----------
    name : str
        Its published name.
    layers : tuple of LayerShape
        From the input to the classifier.
    schemes : tuple of Scheme
        Smallest first.
    """

    name: str
    layers: tuple[LayerShape, ...]
    schemes: tuple[Scheme, ...]


def _layers(table: str) -> tuple[LayerShape, ...]:
    """Read "inputs outputs kernel groups in_size out_size" of each layer, one layer between semicolons."""
    rows = [tuple(int(word) for word in row.split()) for row in table.split(";")]
    return tuple(
        LayerShape(f"conv{index}", inputs, outputs, (kernel, kernel), groups, (before, before), (after, after))
        for index, (inputs, outputs, kernel, groups, before, after) in enumerate(rows)
    )  # fmt: skip


def _scheme(kilobytes: int, bias_layers: int, indices: str, shares: str) -> Scheme:
    """Parse layer indices and the denominators of their shares; 0 means that no weight is trained."""
    pairs = zip(indices.split(), shares.split(), strict=True)
    weights = tuple((int(index), 1 / int(share)) for index, share in pairs if share != "0")
    return Scheme(bias_layers, weights, kilobytes)


_MBV2 = """
3 16 3 1 128 64; 16 16 3 16 64 64; 16 8 1 1 64 64; 8 48 1 1 64 64; 48 48 3 48 64 32; 48 8 1 1 32 32; 8 48 1 1
32 32; 48 48 3 48 32 32; 48 8 1 1 32 32; 8 48 1 1 32 32; 48 48 3 48 32 16; 48 16 1 1 16 16; 16 96 1 1 16 16;
96 96 3 96 16 16; 96 16 1 1 16 16; 16 96 1 1 16 16; 96 96 3 96 16 16; 96 16 1 1 16 16; 16 96 1 1 16 16; 96 96
3 96 16 8; 96 24 1 1 8 8; 24 144 1 1 8 8; 144 144 3 144 8 8; 144 24 1 1 8 8; 24 144 1 1 8 8; 144 144 3 144 8
8; 144 24 1 1 8 8; 24 144 1 1 8 8; 144 144 3 144 8 8; 144 24 1 1 8 8; 24 144 1 1 8 8; 144 144 3 144 8 8; 144
32 1 1 8 8; 32 192 1 1 8 8; 192 192 3 192 8 8; 192 32 1 1 8 8; 32 192 1 1 8 8; 192 192 3 192 8 8; 192 32 1 1 8
8; 32 192 1 1 8 8; 192 192 3 192 8 4; 192 56 1 1 4 4; 56 336 1 1 4 4; 336 336 3 336 4 4; 336 56 1 1 4 4; 56
336 1 1 4 4; 336 336 3 336 4 4; 336 56 1 1 4 4; 56 336 1 1 4 4; 336 336 3 336 4 4; 336 112 1 1 4 4
"""
_MCUNET = """
3 16 3 1 128 64; 16 16 3 16 64 64; 16 8 1 1 64 64; 8 32 1 1 64 64; 32 32 3 32 64 32; 32 16 1 1 32 32; 16 48 1
1 32 32; 48 48 3 48 32 32; 48 16 1 1 32 32; 16 48 1 1 32 32; 48 48 7 48 32 16; 48 24 1 1 16 16; 24 120 1 1 16
16; 120 120 3 120 16 16; 120 24 1 1 16 16; 24 120 1 1 16 16; 120 120 3 120 16 8; 120 40 1 1 8 8; 40 160 1 1 8
8; 160 160 7 160 8 8; 160 40 1 1 8 8; 40 160 1 1 8 8; 160 160 5 160 8 8; 160 48 1 1 8 8; 48 144 1 1 8 8; 144
144 3 144 8 8; 144 48 1 1 8 8; 48 192 1 1 8 8; 192 192 3 192 8 8; 192 48 1 1 8 8; 48 240 1 1 8 8; 240 240 7
240 8 4; 240 96 1 1 4 4; 96 384 1 1 4 4; 384 384 5 384 4 4; 384 96 1 1 4 4; 96 384 1 1 4 4; 384 384 5 384 4 4;
384 96 1 1 4 4; 96 576 1 1 4 4; 576 576 3 576 4 4; 576 160 1 1 4 4
"""
_PROXYLESS = """
3 16 3 1 128 64; 16 16 3 16 64 64; 16 8 1 1 64 64; 8 24 1 1 64 64; 24 24 5 24 64 32; 24 16 1 1 32 32; 16 48 1
1 32 32; 48 48 3 48 32 32; 48 16 1 1 32 32; 16 48 1 1 32 32; 48 48 7 48 32 16; 48 16 1 1 16 16; 16 48 1 1 16
16; 48 48 3 48 16 16; 48 16 1 1 16 16; 16 48 1 1 16 16; 48 48 5 48 16 16; 48 16 1 1 16 16; 16 48 1 1 16 16; 48
48 5 48 16 16; 48 16 1 1 16 16; 16 96 1 1 16 16; 96 96 7 96 16 8; 96 24 1 1 8 8; 24 72 1 1 8 8; 72 72 5 72 8
8; 72 24 1 1 8 8; 24 72 1 1 8 8; 72 72 5 72 8 8; 72 24 1 1 8 8; 24 72 1 1 8 8; 72 72 5 72 8 8; 72 24 1 1 8 8;
24 144 1 1 8 8; 144 144 5 144 8 8; 144 32 1 1 8 8; 32 96 1 1 8 8; 96 96 5 96 8 8; 96 32 1 1 8 8; 32 96 1 1 8
8; 96 96 5 96 8 8; 96 32 1 1 8 8; 32 96 1 1 8 8; 96 96 5 96 8 8; 96 32 1 1 8 8; 32 192 1 1 8 8; 192 192 7 192
8 4; 192 64 1 1 4 4; 64 384 1 1 4 4; 384 384 7 384 4 4; 384 64 1 1 4 4; 64 192 1 1 4 4; 192 192 7 192 4 4; 192
64 1 1 4 4; 64 192 1 1 4 4; 192 192 7 192 4 4; 192 64 1 1 4 4; 64 384 1 1 4 4; 384 384 7 384 4 4; 384 96 1 1 4
4
"""

PUBLISHED_MODELS = (
    PublishedModel(
        "mbv2-w0.35",
        _layers(_MBV2),
        (
            _scheme(49, 16, "36 39 40 41 42 45 48 49", "1 1 0 4 8 8 8 8"),
            _scheme(73, 20, "32 33 36 39 41 42 45 48", "8 2 2 1 4 8 8 1"),
            _scheme(99, 25, "27 30 33 36 39 42 45 48", "1 1 1 1 1 8 2 1"),
            _scheme(123, 31, "27 30 33 36 39 42 45 48", "1 1 1 1 1 2 1 1"),
            _scheme(138, 34, "27 30 33 36 39 42 45 48", "1 1 1 1 1 1 1 1"),
        ),
    ),
    PublishedModel(
        "mcunet-5fps",
        _layers(_MCUNET),
        (
            _scheme(49, 20, "23 24 27 30 33 39", "0 4 2 2 0 0"),
            _scheme(74, 21, "21 23 24 26 27 30", "1 0 1 0 2 1"),
            _scheme(99, 22, "21 24 27 30 36 39", "1 1 1 1 8 4"),
            _scheme(124, 24, "21 24 27 30 33 39", "4 1 1 1 2 2"),
            _scheme(148, 23, "21 24 27 30 36 39", "1 1 1 1 1 2"),
        ),
    ),
    PublishedModel(
        "proxyless-w0.3",
        _layers(_PROXYLESS),
        (
            _scheme(49, 21, "39 42 44 45 50 51 54 57", "4 1 0 1 0 8 4 4"),
            _scheme(74, 28, "33 36 39 42 45 51 54 57", "2 4 1 1 1 2 4 2"),
            _scheme(98, 25, "36 39 42 45 48 51 54 57", "1 2 1 1 4 2 1 1"),
            _scheme(120, 32, "36 39 42 45 48 51 54 57", "1 1 1 1 2 1 1 1"),
            _scheme(148, 45, "36 39 42 45 48 51 54 57", "1 1 1 1 1 1 1 1"),
        ),
    ),
)
