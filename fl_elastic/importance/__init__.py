"""What training each tensor group is worth now."""

from fl_elastic.importance.base import (
    Importance,
    Probe,
    importances,
    make_importance,
    register_importance,
)
from fl_elastic.importance.elastic import ElasticImportance
from fl_elastic.importance.simple import GradientNorm, Magnitude, RandomImportance

__all__ = [
    "ElasticImportance",
    "GradientNorm",
    "Importance",
    "Magnitude",
    "Probe",
    "RandomImportance",
    "importances",
    "make_importance",
    "register_importance",
]
