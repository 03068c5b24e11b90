"""The only module that imports Flower's legacy names.

These names may move with a minor release of Flower; a test fails loudly if they do. Names that only servers need
are loaded at their first use. The client is imported from where it is defined, because ``flwr.client`` loads all of
secure aggregation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.parameter import bytes_to_ndarray, ndarray_to_bytes

if TYPE_CHECKING:
    from flwr.client.mod import secaggplus_mod
    from flwr.common import (
        EvaluateIns,
        EvaluateRes,
        FitIns,
        FitRes,
        Parameters,
        ndarrays_to_parameters,
        parameters_to_ndarrays,
    )
    from flwr.server.client_manager import ClientManager
    from flwr.server.client_proxy import ClientProxy
    from flwr.server.strategy import Strategy as LegacyStrategy
    from flwr.server.workflow import SecAggPlusWorkflow

__all__ = [
    "ClientManager",
    "ClientProxy",
    "EvaluateIns",
    "EvaluateRes",
    "FitIns",
    "FitRes",
    "LegacyStrategy",
    "NumPyClient",
    "Parameters",
    "SecAggPlusWorkflow",
    "bytes_to_ndarray",
    "ndarray_to_bytes",
    "ndarrays_to_parameters",
    "parameters_to_ndarrays",
    "secaggplus_mod",
]

_HOMES = {
    "ClientManager": ("flwr.server.client_manager", "ClientManager"),
    "ClientProxy": ("flwr.server.client_proxy", "ClientProxy"),
    "EvaluateIns": ("flwr.common", "EvaluateIns"),
    "EvaluateRes": ("flwr.common", "EvaluateRes"),
    "FitIns": ("flwr.common", "FitIns"),
    "FitRes": ("flwr.common", "FitRes"),
    "LegacyStrategy": ("flwr.server.strategy", "Strategy"),
    "Parameters": ("flwr.common", "Parameters"),
    "SecAggPlusWorkflow": ("flwr.server.workflow", "SecAggPlusWorkflow"),
    "ndarrays_to_parameters": ("flwr.common", "ndarrays_to_parameters"),
    "parameters_to_ndarrays": ("flwr.common", "parameters_to_ndarrays"),
    "secaggplus_mod": ("flwr.client.mod", "secaggplus_mod"),
}


def __getattr__(name: str) -> Any:
    """Load one of the names in `_HOMES` at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _HOMES[name]
    value = getattr(import_module(module), original)
    globals()[name] = value
    return value
