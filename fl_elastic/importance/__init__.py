"""What training each tensor group is worth now."""

from fl_elastic.importance.base import (
    Importance,
    Probe,
    importances,
    make_importance,
    register_importance,
)
from fl_elastic.importance.channel_scores import (
    FisherChannels,
    GradientChannels,
    RandomChannels,
    WeightNormChannels,
)
from fl_elastic.importance.channels import (
    ChannelScore,
    ChannelScores,
    channel_scores,
    choose_channels,
    make_channel_score,
    register_channel_score,
)
from fl_elastic.importance.elastic import ElasticImportance, SameBatchImportance
from fl_elastic.importance.fisher import FisherImportance
from fl_elastic.importance.simple import GradientNorm, Magnitude, RandomImportance

__all__ = [
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
    "channel_scores",
    "choose_channels",
    "importances",
    "make_channel_score",
    "make_importance",
    "register_channel_score",
    "register_importance",
]
