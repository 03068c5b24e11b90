"""The sample store of a stream: bounded on the disk, safe when a process is killed."""

from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.store.changes import Change, Offer, Relabelled, Withdrawn
from fl_elastic.streaming.store.policies import RETRIEVALS
from fl_elastic.streaming.store.sample_store import Samples, SampleStore

__all__ = [
    "LEAST_CAPACITY",
    "RETRIEVALS",
    "Change",
    "Offer",
    "Relabelled",
    "SampleStore",
    "Samples",
    "Withdrawn",
]
