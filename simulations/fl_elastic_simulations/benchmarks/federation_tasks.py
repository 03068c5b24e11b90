"""Tasks of the federation benchmark: data, fleet and length of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.benchmarks.federation_methods import (
    METHODS,
    MIRRORED,
    READ,
    REFERENCE,
    SAME_HEAD,
    across_rounds,
)
from fl_elastic_simulations.benchmarks.transfer import WEIGHTS
from fl_elastic_simulations.scenario.scenario import Scenario

Table = dict[str, Any]

_SENDING_SHARE = 0.05
_TESTS = 40


@dataclass(frozen=True)
class FederationTask:
    """One federation of the benchmark.

    Attributes
    ----------
    title : str
        Title of the task in tables.
    data : dict
        Data section of the scenario.
    model : str
        Name of a registered model.
    speeds : tuple of (float, int)
        Slowdown and number of clients of each device class.
    training : dict
        Training section of the scenario, without rounds and time.
    reference_rounds : int
        Rounds of the reference, which waits for all clients. All methods get the simulated time that these rounds
        take.
    weights : str, optional
        File of pretrained weights in the data folder.
    methods : dict
        Scenario tables of the methods, by name.
    memory_bytes : dict of float to int
        Bytes that a device may use for training, by its slowdown. Classes that are missing may use what they need.
    costs : str
        Task whose measured costs apply, for a task with the same fleet and training that runs longer; by default
        the task's own.
    time_of : str
        Task with the same fleet whose simulated time and links apply, for a task that asks what can be done in that
        time with other data; by default the task's own.
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
    time_of: str = ""


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
        weights=WEIGHTS,
    ),
}  # fmt: skip
"""Tasks by their name on the command line."""

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
    weights=WEIGHTS,
    methods=across_rounds("features.7"),
)  # fmt: skip

PRETRAINED: dict[str, FederationTask] = {
    "birds-pretrained": replace(
        TASKS["birds-independent-0.3"],
        # AdamW, since SGD at the rate that suits a new head at zero destroys a solved head.
        training={
            "local_steps": 6, "batch_size": 16, "optimizer": "adamw", "learning_rate": 0.0003,
        },
        methods=across_rounds("features.14"),
    ),
    # Far from the data that the weights were trained on: intermediate features are more useful than the last ones.
    "signs-pretrained": _SIGNS,
    # Objects that ImageNet covers, in small lossy images. Slow devices hold labels that no other device holds.
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
    # Speeds are roughly those of a laptop, a Pi 5, a Pi 4 and a Pi Zero 2 W. The memory that PyTorch and the system
    # leave of the 512 MB of the last one is too small for a step that trains the whole model. Most photographs are
    # on these devices.
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
"""Tasks of the benchmark across rounds, by their name on the command line."""


def _long(name: str, rounds: int, *methods: str) -> FederationTask:
    """Return a task with few methods for ``rounds`` rounds of waiting, with the costs of a shorter task."""
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
"""Long runs of plain methods, whose final accuracies the methods above should reach sooner."""

LONGER: dict[str, FederationTask] = {
    "signs-longer": _long("signs-pretrained", 30, "moving cut, solved head", SAME_HEAD),
}
"""Longer runs of methods that do not reach those accuracies in the time of the table."""


def _larger(name: str, pixels: int, title: str) -> FederationTask:
    """Return a task with its images resized to ``pixels``, and few methods, in the time of the task itself."""
    task = PRETRAINED[name]
    then = ", then steps"
    methods = ("closed form, last layer", READ, READ + then, MIRRORED, MIRRORED + then, SAME_HEAD)
    return replace(
        task,
        title=title,
        data=task.data | {"image_size": pixels},
        methods={method: task.methods[method] for method in methods},
        time_of=name,
    )


LARGER: dict[str, FederationTask] = {
    "objects-larger": _larger(
        "objects-pretrained", 96, "CIFAR-10 at 96 pixels, correlated, pretrained MobileNetV2"
    ),
    "birds-larger": _larger("birds-pretrained", 192, "Birds at 192 pixels, pretrained MobileNetV2"),
}
"""The same images at 1.5 times the height and width."""


def bandwidth_of(task: FederationTask, profile: CostProfile) -> float:
    """Return the bytes per second at which sending the model takes 5 % of the training time of the fastest class.

    This is about the share in FedEL's testbed. Rounds here have few steps of small models.
    """
    training = float(task.training["local_steps"] * profile.full_step_seconds)
    return float(profile.parameter_bytes.sum()) / (_SENDING_SHARE * training)


def task_scenario(
    task: FederationTask,
    bandwidth: float = 1e9,
    seconds: float | None = None,
) -> Scenario:
    """Return the scenario of a task: as many rounds as fit into ``seconds``, by default the reference's.

    The deadline of a round is the time that the fastest class needs to train and send everything, as in FedEL.

    Parameters
    ----------
    task : FederationTask
        Task of the benchmark.
    bandwidth : float
        Uplink bytes per second; the downlink is twice as fast.
    seconds : float, optional
        Simulated time of the run, with forty tests at equal intervals.
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
    """Return the name of a method in the form that a scenario accepts."""
    return name.replace(", ", "-").replace(" ", "-").replace("/", "-")
