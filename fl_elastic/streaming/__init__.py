"""Continual adaptation: a device that learns from its own stream."""

from fl_elastic.streaming.store import SampleStore
from fl_elastic.streaming.stored import Samples

__all__ = ["SampleStore", "Samples"]
