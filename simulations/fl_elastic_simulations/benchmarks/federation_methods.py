"""The methods that the federation benchmark compares, as the tables of a scenario."""

from __future__ import annotations

from typing import Any

__all__ = ["CLOSED_FORM", "METHODS", "OURS", "READ", "REFERENCE", "SAME_HEAD", "across_rounds"]

Table = dict[str, Any]

REFERENCE = "fedavg, waiting"
"""Whose final accuracy is the target, and whose time and bytes the others' are compared with."""

OURS = "fl_elastic"

SAME_HEAD = "fewer full steps, solved head"
"""The strongest plain rival across rounds."""

READ = "closed form, chosen places"
"""A head in closed form that chooses where in the model it reads."""

_FULL: Table = {"policy": "full"}
# Where clients differ, rounds pull to and fro: the server goes a longer way along what they agree on, further
# still while rounds agree, and tests and hands out the mean of its last models. With BatchNorm it never goes
# further than the clients did.
_SERVER: Table = {"server_optimizer": "agreement", "server_rate": 1.5, "average": 0.9}
_OURS: Table = {"policy": "elastic", "rule": "contributors"} | _SERVER

METHODS: dict[str, Table] = {
    REFERENCE: _FULL | {"budgeted": False, "stragglers": "wait"},
    "fedavg, waiting, our server": _FULL | {"budgeted": False, "stragglers": "wait"} | _SERVER,
    # Slow devices train the whole model for as many steps as the deadline allows.
    "fewer full steps": _FULL | {"budgeted": True},
    "fewer full steps, our server": _FULL | {"budgeted": True} | _SERVER,
    OURS: _OURS,
    "fl_elastic, int8": _OURS | {"codec": "int8"},
    "last layers, our server": {"policy": "last_k", "rule": "contributors"} | _SERVER,
    "random layers, our server": {"peer": "random_layers"} | _SERVER,
    "timelyfl, our server": {"peer": "timelyfl"} | _SERVER,
    "fedel": {"peer": "fedel"},
    "fedel, free probe, our server": {"peer": "fedel_free_probe"} | _SERVER,
    "heterofl": {"peer": "heterofl"},
}
"""By the name in the table; what is not said has the defaults of a scenario.

Under a deadline each pays for what it needs to know. Whoever trains everything, and ``heterofl``, must know the
time of its own steps, which it sees as it trains: nothing is charged. All others pay for a cost profile in each
client's first fit, and for a choice in each fit where not everything fits; ``fedel`` also for its probes.
"""

_SOLVED: Table = {"round_zero": "closed_form"}
_ELASTIC: Table = {"policy": "elastic"}
# Slow devices train everything, or everything above the cut, for as many steps as the deadline allows.
_FEWER: Table = _FULL | {"budgeted": True}

_ONE_PASS: Table = _FEWER | _SOLVED | {"plan": "none"}

CLOSED_FORM: dict[str, Table] = {
    "closed form, last layer": _ONE_PASS,
    "closed form, input": _ONE_PASS | {"read": "input@grid32"},
    "closed form, random features": _ONE_PASS | {"read": "input@random1024"},
    READ: _ONE_PASS | {"read": "auto"},
    f"{READ}, 640 numbers at most": _ONE_PASS | {"read": "auto>640"},
    f"{READ}, then steps": _FEWER | _SOLVED | {"read": "auto"},
}
"""One pass, no step: from what enters the last layer, from the input, from where the fleet's sums say."""

# Changes go up as 8 bits; what comes down is what everybody trains from, so 16.
_SMALL: Table = {"codec": "int8", "downlink_codec": "fp16"}


def across_rounds(cut: str) -> dict[str, Table]:
    """Return methods that keep from round to round what they found, and plain ones beside them.

    Under a solved head the model is tested as it was when its head was last solved for.

    Parameters
    ----------
    cut : str
        The module from which on the fixed cut trains.
    """
    fixed: Table = {"cut": f"fixed:{cut}"}
    return {
        REFERENCE: METHODS[REFERENCE],
        **CLOSED_FORM,
        "fewer full steps, our server": METHODS["fewer full steps, our server"],
        # The strongest plain rival gets the same help: the head in closed form, solved for again and again.
        SAME_HEAD: _FEWER | _SOLVED,
        "bias only, solved head": {"policy": "bias"} | _SOLVED,
        "last layers, solved head": {"policy": "last_k"} | _SOLVED,
        # Other layers in every fit, the head always up to date: LISA, with what a device can afford.
        "random layers, solved head": {"policy": "random"} | _SOLVED,
        # Published ones choose by themselves, and train the head as well.
        "timelyfl, solved head": {"peer": "timelyfl"} | _SOLVED,
        "fedel, solved head": {"peer": "fedel"} | _SOLVED,
        "fixed cut, solved head": _FEWER | fixed | _SOLVED,
        "moving cut, solved head": _FEWER | {"cut": "moving"} | _SOLVED,
        "moving cut, solved head, 8 bits": _FEWER | {"cut": "moving"} | _SOLVED | _SMALL,
        "fl_elastic, solved head": _ELASTIC | _SOLVED,
        "fl_elastic, moving cut, solved head": _ELASTIC | {"cut": "moving"} | _SOLVED,
    }
