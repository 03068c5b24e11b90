"""fl_elastic in Flower: the client, the strategy wrapper, the apps. The only folder that imports flwr."""

from fl_elastic.flower.app import elastic_client_app
from fl_elastic.flower.checkpoint import Checkpoint, Checkpointed, load_checkpoint
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.round_record import AcceptedReply, Rejection, RoundRecord
from fl_elastic.flower.strategy import PartialUpdates

__all__ = [
    "AcceptedReply",
    "Checkpoint",
    "Checkpointed",
    "ElasticClient",
    "PartialUpdates",
    "Rejection",
    "RoundRecord",
    "elastic_client_app",
    "load_checkpoint",
]
