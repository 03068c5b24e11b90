"""The methods that the federation benchmark compares, as the tables of a scenario."""

from __future__ import annotations

from typing import Any

__all__ = ["ABLATED", "ABLATIONS", "METHODS", "OURS", "REFERENCE", "SPARSE"]

Table = dict[str, Any]

REFERENCE = "fedavg, waiting"
"""Whose final accuracy is the target, and whose time and bytes the others' are compared with."""

OURS = "fl_elastic"
SPARSE = "fl_elastic, top-k"
"""The same, sending a sixteenth of its numbers, with error feedback."""

_FULL: Table = {"policy": "full"}
# Where clients differ, rounds pull to and fro: the server goes a longer way along what they agree on, further
# still while rounds agree, and tests and hands out the mean of its last models.
_SERVER: Table = {"server_optimizer": "agreement", "server_rate": 1.5, "average": 0.9}
_OURS: Table = {"policy": "elastic", "rule": "contributors", "blend": 0.5} | _SERVER
_FIXED: Table = _OURS | {"server_optimizer": "sgd"}

METHODS: dict[str, Table] = {
    REFERENCE: _FULL | {"budgeted": False, "stragglers": "wait"},
    "fedavg, waiting, averaged": _FULL | {"budgeted": False, "stragglers": "wait"} | _SERVER,
    "fedavg, dropping": _FULL | {"budgeted": False, "stragglers": "drop"},
    # Slow devices train the whole model for as many steps as the deadline allows; with FedProx's pull; and
    # with FedNova's normalisation, which was made for exactly this.
    "fewer full steps": _FULL | {"budgeted": True},
    "fewer full steps, averaged": _FULL | {"budgeted": True} | _SERVER,
    "fewer full steps, fedprox": _FULL | {"budgeted": True, "proximal": 0.01},
    "fewer full steps, fednova": _FULL | {"budgeted": True, "normalise_steps": True},
    "heterofl": {"peer": "heterofl"},
    "timelyfl-style": {"peer": "timelyfl"},
    "fedpart-style": {"peer": "fedpart"},
    "random layers": {"peer": "random_layers"},
    "elastictrainer in fedavg": {"peer": "elastictrainer"},
    "fedel": {"peer": "fedel"},
    "last layers": {"policy": "last_k", "rule": "contributors"},
    OURS: _OURS,
    SPARSE: _OURS | {"codec": "topk"},
}
"""By the name in the table; what is not said has the defaults of a scenario."""

ABLATED = "server rate 1.5"
"""The method that each ablation differs from in one thing, or two where its name says so."""

ABLATIONS: dict[str, Table] = {
    ABLATED: _FIXED,
    "no average": _FIXED | {"average": 0.0},
    "server rate 1": _FIXED | {"server_rate": 1.0},
    "server rate 2": _FIXED | {"server_rate": 2.0},
    "no average, server rate 1": _FIXED | {"average": 0.0, "server_rate": 1.0},
    "server momentum": _FIXED | {"server_optimizer": "momentum", "server_rate": 0.15},
    "int8": _FIXED | {"codec": "int8"},
    # What a fit gains with the root of its steps: then everything is trained, in fewer steps.
    "root of the steps": _FIXED | {"returns": 0.5},
    "no coverage": _FIXED | {"deep_every": 0, "exploration": 0.0},
    "deep every 2": _FIXED | {"deep_every": 2},
    "own importance": _FIXED | {"blend": 0.0},
    "random choice": _FIXED | {"policy": "random"},
    "rule all": _FIXED | {"rule": "all"},
    "rule inverse_probability": _FIXED | {"rule": "inverse_probability"},
    "steps normalised": _FIXED | {"normalise_steps": True},
    "inference prefix": _FIXED | {"inference_prefix": True},
}
"""`OURS` at a fixed server rate, and that changed, one thing at a time."""
