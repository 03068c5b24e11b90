"""Sizes of the sums for a head: held-out examples, bytes on the wire, and memory while they are computed."""

from __future__ import annotations

from fl_elastic.closed_form.folds import FOLDS

# Bytes of a header, at most.
_FRAME = 512
# Number of held-out examples, or half the number of features if that is larger: then their rows hold no more
# numbers than the products of all features.
_HELD_OUT = 320
# Peak of bytes while sums are made and written: for each feature of a held-out example, and for each product of two
# features if products are added up. Measured with 200 to 3,000 examples of 700 to 2,048 features.
_BYTES_OF_A_ROW, _BYTES_OF_A_PRODUCT = 40, 52


def held_out(features: int) -> int:
    """Return the largest number of examples that is held out for this many features."""
    return max(_HELD_OUT, features // 2)


def sums_bytes(features: int, outputs: int, examples: int) -> int:
    """Return how many bytes a client's sums take on the wire.

    Held-out examples travel as rows, at most as many per fold as there are features; the others as products.
    """
    held = min(examples, held_out(features))
    numbers = min(held, FOLDS * features) * (features + outputs)
    if examples > held:
        numbers += features * (features + 1) // 2 + features * outputs
    return _FRAME + 4 * numbers + 8 * (FOLDS + 1) * (features + 2 * outputs)


def features_in_memory(memory: float, examples: int) -> int:
    """Return the number of features up to which the sums over these examples fit into this many bytes.

    >>> features_in_memory(1e8, 300), features_in_memory(1e8, 1000)
    (8333, 1386)
    """
    most = int((memory / _BYTES_OF_A_PRODUCT) ** 0.5)
    # With more features all examples are held out, and no products are added up.
    if examples <= _HELD_OUT or most >= 2 * examples - 1:
        return int(memory / (_BYTES_OF_A_ROW * examples))
    return most
