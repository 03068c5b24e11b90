"""What travels: the manifest, partial updates, and their packed form."""

from fl_elastic.errors import StaleModelError, UpdateError
from fl_elastic.update.change_log import ChangeLog
from fl_elastic.update.codecs import CODECS, Codec
from fl_elastic.update.feedback import ErrorFeedback
from fl_elastic.update.manifest import Manifest, Role, load_weights, weights_of
from fl_elastic.update.model_store import ModelStore
from fl_elastic.update.model_wire import decode_weights, encode_weights
from fl_elastic.update.partial import (
    Limits,
    PartialUpdate,
    check_update,
    check_variances,
    trained_part,
)
from fl_elastic.update.parts import Masks
from fl_elastic.update.wire import decode, encode

__all__ = [
    "CODECS",
    "ChangeLog",
    "Codec",
    "ErrorFeedback",
    "Limits",
    "Manifest",
    "Masks",
    "ModelStore",
    "PartialUpdate",
    "Role",
    "StaleModelError",
    "UpdateError",
    "check_update",
    "check_variances",
    "decode",
    "decode_weights",
    "encode",
    "encode_weights",
    "load_weights",
    "trained_part",
    "weights_of",
]
