"""Continual adaptation: a device that learns from its own stream."""

from fl_elastic.streaming.arrivals import Observation
from fl_elastic.streaming.drift import DRIFT_DETECTORS, DriftDetector
from fl_elastic.streaming.guard import Guard
from fl_elastic.streaming.latent import Latent
from fl_elastic.streaming.learner import StreamLearner
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.streaming.stream_options import ClosedForm, Replay, StreamOptions, Trigger

__all__ = [
    "DRIFT_DETECTORS",
    "ClosedForm",
    "DriftDetector",
    "Guard",
    "Latent",
    "Observation",
    "Replay",
    "SampleStore",
    "StreamLearner",
    "StreamOptions",
    "Trigger",
]
