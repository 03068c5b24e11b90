"""What every tensor group of a model costs to train on this device."""

from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.measure import profile_model
from fl_elastic.profiling.prefix import CacheTerms, elastic_forward
from fl_elastic.profiling.profile import CostProfile, Mask, ProfileKey
from fl_elastic.profiling.store import load_or_measure, load_profile, save_profile

__all__ = [
    "CacheTerms",
    "Clock",
    "CostProfile",
    "Mask",
    "ProfileKey",
    "clock_for",
    "elastic_forward",
    "load_or_measure",
    "load_profile",
    "profile_model",
    "save_profile",
]
