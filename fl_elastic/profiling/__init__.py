"""What every tensor group of a model costs to train on this device."""

from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.measure import profile_model
from fl_elastic.profiling.profile import CostProfile
from fl_elastic.profiling.store import load_profile, save_profile

__all__ = [
    "CostProfile",
    "estimate_profile",
    "load_profile",
    "profile_model",
    "save_profile",
]
