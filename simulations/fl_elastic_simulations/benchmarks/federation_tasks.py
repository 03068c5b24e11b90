"""The federations of the benchmark: data, fleet and how long they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.benchmarks.federation_methods import (
    METHODS,
    REFERENCE,
    SAME_HEAD,
    across_rounds,
)
from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = [
    "CONVERGED",
    "LONGER",
    "PRETRAINED",
    "SEEDS",
    "TASKS",
    "FederationTask",
    "bandwidth_of",
    "method_key",
    "methods_of",
    "task_scenario",
]

Table = dict[str, Any]

_SENDING_SHARE = 0.05
_TESTS = 40
SEEDS = (0, 1, 2)
"""With which every cell of the table is run."""


@dataclass(frozen=True)
class FederationTask:
    """One federation.

    Attributes
    ----------
    title : str
        For tables.
    data : dict
        The scenario's section.
    model : str
        Registered model.
    speeds : tuple of (float, int)
        Slowdown and number of clients of each device class.
    training : dict
        The scenario's section, besides rounds and time.
    reference_rounds : int
        Rounds of the reference that waits for everyone; all methods get the simulated time that these take.
    weights : str, optional
        File of pretrained weights in the data folder.
    methods : dict
        Tables of methods by name.
    memory_bytes : dict of float to int
        What a device may use for training, by its slowdown; classes that are not there may use what they need.
    costs : str
        Task whose measured costs count, where it is not this one: the same fleet and training, run for longer.
    """

    title: str
    data: Table
    model: str
    speeds: tuple[tuple[float, int], ...]
    training: Table
    reference_rounds: int
    weights: str | None = None
    methods: dict[str, Table] = field(default_factory=lambda: METHODS)
    memory_bytes: dict[float, int] = field(default_factory=dict)
    costs: str = ""


TASKS: dict[str, FederationTask] = {
    "cifar-correlated-0.3": FederationTask(
        title="CIFAR-10, correlated, alpha 0.3",
        data={
            "dataset": "cifar10_jpegq75", "partition": "dirichlet", "layout": "correlated",
            "alpha": 0.3, "min_examples": 32, "test_limit": 2000,
        },
        model="resnet8",
        speeds=((1.0, 10), (2.0, 10), (3.0, 10), (4.0, 10)),
        training={
            "local_steps": 8, "batch_size": 32, "learning_rate": 0.1, "client_fraction": 0.25,
        },
        reference_rounds=45,
    ),
    "har-correlated": FederationTask(
        title="Activities of 23 people, correlated",
        data={
            "dataset": "har", "partition": "natural", "layout": "correlated", "min_examples": 1,
        },
        model="har_cnn",
        speeds=((1.0, 6), (2.0, 6), (3.0, 6), (4.0, 5)),
        training={
            "local_steps": 12, "batch_size": 16, "learning_rate": 0.05, "client_fraction": 0.5,
        },
        reference_rounds=30,
    ),
    "signs-correlated": FederationTask(
        title="Traffic signs, correlated",
        data={
            "dataset": "gtsrb", "partition": "natural", "layout": "correlated", "test_limit": 1500,
        },
        model="resnet8",
        speeds=((1.0, 5), (2.0, 5)),
        training={"local_steps": 12, "batch_size": 32, "learning_rate": 0.1},
        reference_rounds=30,
    ),
    "birds-independent-0.3": FederationTask(
        title="Birds, pretrained MobileNetV2",
        data={"dataset": "cub50", "partition": "dirichlet", "alpha": 0.3, "min_examples": 16},
        model="mobilenet_v2",
        speeds=((1.0, 2), (2.0, 2), (3.0, 2), (4.0, 2)),
        training={"local_steps": 6, "batch_size": 16, "learning_rate": 0.01, "momentum": 0.9},
        reference_rounds=6,
        weights="weights/mobilenet_v2_imagenet_onnx7_backbone.npz",
    ),
}  # fmt: skip
"""By the name on the command line."""

_SIGNS = FederationTask(
    title="Traffic signs at 64 pixels, pretrained MobileNetV2",
    data={
        "dataset": "gtsrb", "image_size": 64, "partition": "dirichlet", "alpha": 0.3,
        "min_examples": 16,
    },
    model="mobilenet_v2",
    speeds=((1.0, 2), (2.0, 2), (3.0, 2), (4.0, 2)),
    training={
        "local_steps": 12, "batch_size": 16, "optimizer": "adamw", "learning_rate": 0.0003,
    },
    reference_rounds=8,
    weights="weights/mobilenet_v2_imagenet_onnx7_backbone.npz",
    methods=across_rounds("features.7"),
)  # fmt: skip

PRETRAINED: dict[str, FederationTask] = {
    "birds-pretrained": replace(
        TASKS["birds-independent-0.3"],
        # SGD at the rate that suits a head that begins at nothing destroys one that was solved for.
        training={
            "local_steps": 6, "batch_size": 16, "optimizer": "adamw", "learning_rate": 0.0003,
        },
        methods=across_rounds("features.14"),
    ),
    # Far from what the weights were trained on: features of the middle say more than the last ones.
    "signs-pretrained": _SIGNS,
    # Things that ImageNet knows, from small lossy images, and slow devices with labels that nobody else holds.
    "objects-pretrained": replace(
        _SIGNS,
        title="CIFAR-10 at 64 pixels, correlated, pretrained MobileNetV2",
        data={
            "dataset": "cifar10_jpegq75", "image_size": 64, "partition": "dirichlet",
            "layout": "correlated", "alpha": 0.3, "min_examples": 16, "train_limit": 4000,
            "test_limit": 1500,
        },
        methods=across_rounds("features.14"),
    ),
    # Roughly as a laptop, a Pi 5, a Pi 4 and a Pi Zero 2 W are to each other. What PyTorch and the system leave of
    # the last one's 512 MB does not hold a step that trains the whole model, and most photographs are on these.
    "birds-pi-fleet": replace(
        TASKS["birds-independent-0.3"],
        title="Birds on a laptop and three kinds of Pi, pretrained MobileNetV2",
        data={
            "dataset": "cub50", "partition": "dirichlet", "layout": "correlated", "alpha": 0.3,
            "min_examples": 16,
        },
        speeds=((1.0, 2), (4.0, 2), (8.0, 2), (16.0, 3)),
        training={
            "local_steps": 6, "batch_size": 16, "optimizer": "adamw", "learning_rate": 0.0003,
        },
        reference_rounds=4,
        methods=across_rounds("features.14"),
        memory_bytes={16.0: 128 << 20},
    ),
}  # fmt: skip
"""Tasks of the benchmark across rounds, by the name on the command line."""


def _long(name: str, rounds: int, *methods: str) -> FederationTask:
    """Return a task of few methods that lasts for so many rounds of waiting, by the clock of a shorter one."""
    task = PRETRAINED[name]
    return replace(
        task,
        title=f"{task.title}, AdamW",
        reference_rounds=rounds,
        methods={method: task.methods[method] for method in methods},
        costs=name,
    )


CONVERGED: dict[str, FederationTask] = {
    "birds-converged": _long("birds-pretrained", 60, REFERENCE),
    "signs-converged": _long("signs-pretrained", 60, REFERENCE),
}
"""How far plain methods get in the end, which those above are to reach sooner."""

LONGER: dict[str, FederationTask] = {
    "signs-longer": _long("signs-pretrained", 30, "moving cut, solved head", SAME_HEAD),
}
"""Methods that in the time of the table get less far than that."""


def bandwidth_of(task: FederationTask, profile: CostProfile) -> float:
    """Return the bytes per second with which sending the model takes 5 % of the fastest class's training.

    That is about its share in FedEL's testbed; rounds here have few steps of small models.
    """
    training = float(task.training["local_steps"] * profile.full_step_seconds)
    return float(profile.parameter_bytes.sum()) / (_SENDING_SHARE * training)


def task_scenario(
    task: FederationTask,
    bandwidth: float = 1e9,
    seconds: float | None = None,
) -> Scenario:
    """Return the scenario of a task: as many rounds as fit into the simulated time, or the reference's.

    The deadline of a round is the time in which the fastest class trains and sends everything, as in FedEL.

    Parameters
    ----------
    task : FederationTask
        Which.
    bandwidth : float
        Bytes per second to the server; from it twice as many.
    seconds : float, optional
        Simulated time, with forty tests at equal intervals.
    """
    reference = REFERENCE if REFERENCE in task.methods else next(iter(task.methods))
    table: Table = {
        "title": task.title,
        "seeds": [0],
        "data": task.data,
        "model": {"name": task.model} | ({} if task.weights is None else {"weights": task.weights}),
        "training": {"optimizer": "sgd"}
        | task.training
        | {"rounds": task.reference_rounds if seconds is None else 100_000}
        | ({} if seconds is None else {"simulated_seconds": seconds, "tests": _TESTS}),
        "deadline": {"quantile": 0.0},
        "fleet": [
            {
                "name": f"1/{slowdown:g}" if slowdown != 1 else "1",
                "device": "laptop",
                "count": count,
                "slowdown": slowdown,
                "uplink_bytes_per_second": bandwidth,
                "downlink_bytes_per_second": 2 * bandwidth,
            }
            | ({"memory_bytes": held} if (held := task.memory_bytes.get(slowdown)) else {})
            for slowdown, count in task.speeds
        ],
        "methods": [method_key(name) for name in task.methods],
        "method": {method_key(name): method for name, method in task.methods.items()},
        "target": {"method": method_key(reference)},
    }
    return Scenario.from_json(json.dumps(table))


def methods_of(tasks: Mapping[str, FederationTask]) -> dict[str, Table]:
    """Return the methods of several tasks by name."""
    return {name: method for task in tasks.values() for name, method in task.methods.items()}


def method_key(name: str) -> str:
    """Return the name of a method as a scenario may have it."""
    return name.replace(", ", "-").replace(" ", "-").replace("/", "-")
