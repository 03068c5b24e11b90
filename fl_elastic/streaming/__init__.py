"""Continual adaptation: a device that learns from its own stream."""

from fl_elastic.streaming.drift import (
    DriftDetector,
    drift_detectors,
    make_drift_detector,
    register_drift_detector,
)
from fl_elastic.streaming.guard import Guard
from fl_elastic.streaming.latent import Latent
from fl_elastic.streaming.learner import StreamLearner
from fl_elastic.streaming.observation import Observation
from fl_elastic.streaming.replay import (
    DarkReplay,
    ExperienceReplay,
    Replay,
    make_replay,
    register_replay,
    replays,
)
from fl_elastic.streaming.store import SampleStore
from fl_elastic.streaming.stored import Samples
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
    "drift_detectors",
    "make_drift_detector",
    "make_replay",
    "register_drift_detector",
    "register_replay",
    "replays",
]
