"""fl_elastic in Flower: the client, the strategy wrapper, the apps. The only folder that imports flwr.

Names are loaded when they are first used, see `fl_elastic.lazy_names`.
"""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late

if TYPE_CHECKING:
    from fl_elastic.flower.app import elastic_client_app
    from fl_elastic.flower.checkpoint import Checkpoint, Checkpointed, load_checkpoint
    from fl_elastic.flower.client import ElasticClient
    from fl_elastic.flower.initial import initial_arrays
    from fl_elastic.flower.round import RoundRecord
    from fl_elastic.flower.round_config import Deadline, RoundConfig
    from fl_elastic.flower.secure import SecurePartialUpdates
    from fl_elastic.flower.strategy import PartialUpdates
    from fl_elastic.flower.stream_client import StreamClient

__all__ = [
    "Checkpoint",
    "Checkpointed",
    "Deadline",
    "ElasticClient",
    "PartialUpdates",
    "RoundConfig",
    "RoundRecord",
    "SecurePartialUpdates",
    "StreamClient",
    "elastic_client_app",
    "initial_arrays",
    "load_checkpoint",
]

_MODULES = {
    "Checkpoint": "checkpoint",
    "Checkpointed": "checkpoint",
    "Deadline": "round_config",
    "ElasticClient": "client",
    "PartialUpdates": "strategy",
    "RoundRecord": "round",
    "RoundConfig": "round_config",
    "SecurePartialUpdates": "secure",
    "StreamClient": "stream_client",
    "elastic_client_app": "app",
    "initial_arrays": "initial",
    "load_checkpoint": "checkpoint",
}

__getattr__, __dir__ = loaded_late(__name__, _MODULES)
