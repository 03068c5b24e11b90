"""What every tensor group of a model costs to train on this device."""

from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.estimate import estimate_profile, estimated_modes, refined
from fl_elastic.profiling.in_flight import in_flight
from fl_elastic.profiling.measure import profile_model
from fl_elastic.profiling.memory import StepMemory, mask_bytes, recompute_seconds, step_memory
from fl_elastic.profiling.mode_costs import ModeCosts
from fl_elastic.profiling.modes import STANDARD_MODES, measure_modes, with_modes
from fl_elastic.profiling.prefix import CacheTerms, elastic_forward, prefix_seconds
from fl_elastic.profiling.profile import CostProfile, Mask, ProfileKey
from fl_elastic.profiling.store import load_or_measure, load_profile, save_profile

__all__ = [
    "STANDARD_MODES",
    "CacheTerms",
    "Clock",
    "CostProfile",
    "Mask",
    "ModeCosts",
    "ProfileKey",
    "StepMemory",
    "clock_for",
    "elastic_forward",
    "estimate_profile",
    "estimated_modes",
    "in_flight",
    "load_or_measure",
    "load_profile",
    "mask_bytes",
    "measure_modes",
    "prefix_seconds",
    "profile_model",
    "recompute_seconds",
    "refined",
    "save_profile",
    "step_memory",
    "with_modes",
]
