"""Cost profiles: what it costs to train each tensor group of a model on this device."""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late
from fl_elastic.profiling.profile import CostProfile
from fl_elastic.profiling.store import load_profile, save_profile

if TYPE_CHECKING:
    from fl_elastic.profiling.estimate import estimate_profile
    from fl_elastic.profiling.measure import profile_model

__all__ = [
    "CostProfile",
    "estimate_profile",
    "load_profile",
    "profile_model",
    "save_profile",
]

__getattr__, __dir__ = loaded_late(
    __name__, {"estimate_profile": "estimate", "profile_model": "measure"}
)
