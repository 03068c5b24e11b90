"""Messages between clients and server: the manifest, partial updates, models, and their wire format."""

from fl_elastic.errors import UpdateError
from fl_elastic.update.codecs.base import CODECS, Codec
from fl_elastic.update.manifest import Manifest, load_weights, weights_of
from fl_elastic.update.partial import PartialUpdate
from fl_elastic.update.update_wire import decode, encode

__all__ = [
    "CODECS",
    "Codec",
    "Manifest",
    "PartialUpdate",
    "UpdateError",
    "decode",
    "encode",
    "load_weights",
    "weights_of",
]
