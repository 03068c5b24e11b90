"""The only module that imports Flower's legacy names.

These names may move with a minor release of Flower; a test fails loudly if they do. Names that only servers need
are loaded at their first use. The client is imported from where it is defined, because ``flwr.client`` loads all of
secure aggregation.
"""

from typing import TYPE_CHECKING

from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.parameter import bytes_to_ndarray, ndarray_to_bytes

from fl_elastic.lazy_names import loaded_late

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

__getattr__, __dir__ = loaded_late(
    __name__,
    {
        "ClientManager": "flwr.server.client_manager",
        "ClientProxy": "flwr.server.client_proxy",
        "LegacyStrategy": "flwr.server.strategy:Strategy",
        "SecAggPlusWorkflow": "flwr.server.workflow",
        "secaggplus_mod": "flwr.client.mod",
        **dict.fromkeys(
            [
                "EvaluateIns", "EvaluateRes", "FitIns", "FitRes", "Parameters", "ndarrays_to_parameters",
                "parameters_to_ndarrays",
            ],
            "flwr.common",
        ),
    },
)  # fmt: skip
