"""A realistic summary, made by a seeded function: ten devices of six classes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

Summary = dict[str, Any]

GROUPS = [
    "fc",
    *(
        f"layer{stage}.{block}.conv{conv}"
        for stage in (3, 2)
        for block in (1, 0)
        for conv in (2, 1)
    ),
    "layer1.0.downsample_projection.conv",
    "bn1",
    "conv1",
]

DEVICES = [
    ("pi_zero_2w", "Raspberry Pi Zero 2 W", 2, 12.0, 2.5),
    ("pi_3b", "Raspberry Pi 3B", 2, 6.5, 2.0),
    ("pi_4b", "Raspberry Pi 4B", 2, 3.0, 1.5),
    ("pi_5", "Raspberry Pi 5", 2, 1.4, 1.0),
    ("jetson_nano", "Jetson Nano", 1, 2.2, 1.2),
    ("laptop", "Laptop", 1, 1.0, 1.0),
]

# Of each method: accuracy that it tends to, rounds to get there, seconds and bytes of one round.
COURSES = {
    "full": (0.955, 6.0, 20.3, 2_400_000),
    "elastic": (0.951, 6.8, 9.1, 1_050_000),
    "random": (0.925, 9.5, 9.2, 1_090_000),
    "head": (0.80, 5.0, 6.4, 90_000),
}


def _history(
    generator: random.Random, course: tuple[float, float, float, int], seeds: int, rounds: int
) -> list[dict[str, Any]]:
    best, slowness, seconds, uplink = course
    history = []
    for seed in range(seeds):
        spent, pace = 0.0, seconds * generator.uniform(0.97, 1.03)
        offset = generator.gauss(0, 0.012)
        for index in range(rounds + 1):
            grown = 1 - 2.718281828 ** (-index / slowness)
            noise = generator.gauss(0, 0.03) * (1 - grown) + generator.gauss(0, 0.004)
            accuracy = 0.1 + (best + offset - 0.1) * grown + noise
            history.append(
                {
                    "seed": seed,
                    "round": index,
                    "accuracy": min(max(accuracy, 0.0), 1.0),
                    "loss": 2.3 * (1 - grown) + 0.1,
                    "simulated_seconds": spent,
                    "uplink_bytes": uplink * index,
                    "downlink_bytes": 2_400_000 * index,
                }
            )
            spent += pace * generator.uniform(0.95, 1.05)
    return history


def _coverage(
    generator: random.Random, method: str, count: int, speedup: float, rounds: int
) -> list[list[float]]:
    """Return the shares of one class: the depth shrinks with the speed-up that is asked for."""

    def trains(group: int) -> bool:
        if method == "full":
            return True
        if method == "head":
            return group == 0
        if method == "random":
            return generator.random() < 1 / speedup
        deepest = len(GROUPS) / speedup + generator.uniform(-1.5, 1.5)
        return group < deepest or generator.random() < 0.06

    return [
        [sum(trains(group) for _ in range(count)) / count for group in range(len(GROUPS))]
        for _ in range(rounds)
    ]


def _first_above(history: list[dict[str, Any]], target: float) -> float | None:
    return next(
        (point["simulated_seconds"] for point in history if point["accuracy"] >= target), None
    )


def build_summary(
    methods: tuple[str, ...] = ("full", "elastic"), seeds: int = 3, rounds: int = 40
) -> Summary:
    """Make a summary like that of a real run; the same arguments give the same summary."""
    generator = random.Random(7)
    target = 0.935
    entries = {}
    for method in methods:
        history = _history(generator, COURSES[method], seeds, rounds)
        last = [point for point in history if point["round"] == rounds]
        accuracies = [point["accuracy"] for point in last]
        mean = sum(accuracies) / seeds
        asked = {name: 1.0 if method == "full" else speed for name, _, _, _, speed in DEVICES}
        entries[method] = {
            "final_accuracy": mean,
            "final_accuracy_std": (sum((a - mean) ** 2 for a in accuracies) / seeds) ** 0.5,
            "rounds": rounds,
            "simulated_seconds": sum(point["simulated_seconds"] for point in last) / seeds,
            "seconds_to_target": _first_above(history, target),
            "uplink_bytes": last[0]["uplink_bytes"],
            "downlink_bytes": last[0]["downlink_bytes"],
            "rejected_updates": 0,
            "devices": {
                name: {
                    "requested_speedup": speed,
                    "achieved_speedup": speed * generator.uniform(0.9, 1.05) if speed > 1 else 1.0,
                }
                for name, speed in asked.items()
            },
            "coverage": {
                name: _coverage(generator, method, count, asked[name], rounds)
                for name, _, count, _, _ in DEVICES
            },
            "history": history,
        }
    return {
        "title": "Ten unequal devices, digits",
        "dataset": "digits",
        "model": "digits_cnn",
        "clients": 10,
        "rounds": rounds,
        "seeds": list(range(seeds)),
        "simulated": True,
        "target_accuracy": target,
        "target_rule": "final accuracy of full minus 1 point",
        "environment": {
            "python": "3.11.2",
            "torch": "2.10.0",
            "flwr": "1.41.0",
            "machine": "two cores, x86_64",
            "date": "2026-01-05",
        },
        "devices": [
            {
                "device": name,
                "label": label,
                "count": count,
                "slowdown": slowdown,
                "requested_speedup": speed,
            }
            for name, label, count, slowdown, speed in DEVICES
        ],
        "groups": list(GROUPS),
        "methods": entries,
    }


@pytest.fixture(scope="session")
def make_summary() -> Callable[..., Summary]:
    """Give the function that makes summaries: its results may be edited by a test."""
    return build_summary
