"""How the numbers of a partial update are written: one class per way, found by name."""

from fl_elastic.update.codecs.base import CODECS, Codec

__all__ = [
    "CODECS",
    "Codec",
]
