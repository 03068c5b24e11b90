"""What travels: the manifest, partial updates, and their packed form."""

from fl_elastic.errors import UpdateError
from fl_elastic.update.codecs import Codec, codecs, make_codec, register_codec
from fl_elastic.update.manifest import Manifest, Role, load_weights, weights_of
from fl_elastic.update.partial import Limits, PartialUpdate, check_update
from fl_elastic.update.wire import decode, decode_weights, encode, encode_weights

__all__ = [
    "Codec",
    "Limits",
    "Manifest",
    "PartialUpdate",
    "Role",
    "UpdateError",
    "check_update",
    "codecs",
    "decode",
    "decode_weights",
    "encode",
    "encode_weights",
    "load_weights",
    "make_codec",
    "register_codec",
    "weights_of",
]
