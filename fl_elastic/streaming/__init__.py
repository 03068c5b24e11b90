"""Continual adaptation: a device that learns from its own stream."""

from fl_elastic.streaming.drift import DRIFT_DETECTORS, DriftDetector
from fl_elastic.streaming.guard import Guard
from fl_elastic.streaming.latent import Latent
from fl_elastic.streaming.learner import StreamLearner
from fl_elastic.streaming.observation import Observation
from fl_elastic.streaming.replay import REPLAYS, DarkReplay, ExperienceReplay, Replay
from fl_elastic.streaming.store.sample_store import Samples, SampleStore
from fl_elastic.streaming.stream_options import StreamOptions
from fl_elastic.streaming.triggers import (
    AllOf,
    AnyOf,
    EverySamples,
    EverySeconds,
    OnDrift,
    OnMains,
    Trigger,
    WhenIdle,
)

__all__ = [
    "DRIFT_DETECTORS",
    "REPLAYS",
    "AllOf",
    "AnyOf",
    "DarkReplay",
    "DriftDetector",
    "EverySamples",
    "EverySeconds",
    "ExperienceReplay",
    "Guard",
    "Latent",
    "Observation",
    "OnDrift",
    "OnMains",
    "Replay",
    "SampleStore",
    "Samples",
    "StreamLearner",
    "StreamOptions",
    "Trigger",
    "WhenIdle",
]
