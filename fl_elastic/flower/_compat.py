"""The only module that imports Flower's legacy names.

They may move with a minor release of Flower; a test fails loudly if they do.
"""

from flwr.client import NumPyClient
from flwr.compat.common.parameter import bytes_to_ndarray, ndarray_to_bytes

__all__ = ["NumPyClient", "bytes_to_ndarray", "ndarray_to_bytes"]
