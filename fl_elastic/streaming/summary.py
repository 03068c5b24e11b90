"""Summary of a learner's stream as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fl_elastic.environment import environment
from fl_elastic.streaming.learner import StreamLearner
from fl_elastic.streaming.progress import label_name

FORMAT = "fl_elastic.stream_summary"


def stream_summary(learner: StreamLearner) -> dict[str, Any]:
    """Return counts, accuracy, drifts, adaptations and the store's contents along the stream.

    Accuracies are prequential: each prediction is made before the model learns from the sample. ``points`` are
    those of `StreamRecord`. ``groups`` names all groups that were ever trained, in the model's order; ``trained``
    of each adaptation holds indices into it.
    """
    progress, record = learner.progress, learner.record
    groups = _in_order(learner)
    places = {name: place for place, name in enumerate(groups)}
    return {
        "format": FORMAT,
        "environment": environment(),
        "observed": progress.observed,
        "labelled": progress.labelled,
        "unlearned": progress.unlearned,
        "accuracy": progress.right / progress.labelled if progress.labelled else None,
        "prequential_accuracy": progress.accuracy if progress.labelled else None,
        "refused": dict(progress.rejected),
        "drifts": progress.drifts,
        "adaptations": progress.adaptations,
        "rolled_back": progress.rolled_back,
        "training_seconds": sum(adaptation.seconds for adaptation in learner.adaptations),
        "classes": list(learner.classes),
        "reads": learner.reads,
        "stored": {label_name(label): count for label, count in learner.store.classes.items()},
        "store_bytes": learner.store.used_bytes,
        "drift_marks": list(record.drifts),
        "points": [asdict(point) for point in record.points],
        "groups": groups,
        "adapted": [
            {
                "at": adaptation.at,
                "drift": adaptation.drift,
                "undone": adaptation.undone,
                "seconds": adaptation.seconds,
                "trained": [places[name] for name in adaptation.trained],
            }
            for adaptation in learner.adaptations
        ],
    }


def _in_order(learner: StreamLearner) -> list[str]:
    """Return the names of all groups that were trained, in the model's order."""
    trained = dict.fromkeys(
        name for adaptation in learner.adaptations for name in adaptation.trained
    )
    names = [name for name, _ in learner.model.named_parameters()]

    def place(group: str) -> int:
        # If the learner keeps features, group names have a prefix before the model's own names.
        own = group.removeprefix("model.")
        return next((i for i, name in enumerate(names) if name.startswith(own)), len(names))

    return sorted(trained, key=place)
