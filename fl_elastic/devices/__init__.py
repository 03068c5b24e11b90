"""What a device tells of itself: processors, memory, power, heat and energy."""

from fl_elastic.devices.energy import EnergyMeter
from fl_elastic.devices.platform import read_platform

__all__ = [
    "EnergyMeter",
    "read_platform",
]
