"""Importance: what training each tensor group is worth now. Scores are found by name and loaded when needed."""

from fl_elastic.planning.importance.base import IMPORTANCES, Importance, Probe
from fl_elastic.planning.importance.channels import (
    CHANNEL_SCORES,
    ChannelScore,
)

__all__ = [
    "CHANNEL_SCORES",
    "IMPORTANCES",
    "ChannelScore",
    "Importance",
    "Probe",
]
