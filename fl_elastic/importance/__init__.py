"""What training each tensor group is worth now."""

from fl_elastic.importance.base import IMPORTANCES, Importance, Probe
from fl_elastic.importance.channel_scores import (
    FisherChannels,
    GradientChannels,
    RandomChannels,
    WeightNormChannels,
)
from fl_elastic.importance.channels import (
    CHANNEL_SCORES,
    ChannelScore,
    ChannelScores,
    choose_channels,
)
from fl_elastic.importance.elastic import ElasticImportance, SameBatchImportance
from fl_elastic.importance.fisher import FisherImportance
from fl_elastic.importance.simple import GradientNorm, Magnitude, RandomImportance

__all__ = [
    "CHANNEL_SCORES",
    "IMPORTANCES",
    "ChannelScore",
    "ChannelScores",
    "ElasticImportance",
    "FisherChannels",
    "FisherImportance",
    "GradientChannels",
    "GradientNorm",
    "Importance",
    "Magnitude",
    "Probe",
    "RandomChannels",
    "RandomImportance",
    "SameBatchImportance",
    "WeightNormChannels",
    "choose_channels",
]
