"""Methods that the federation benchmark compares, as tables of a scenario."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]

REFERENCE = "fedavg, waiting"
"""Method whose final accuracy is the target, and to whose time and bytes those of the others are compared."""

OURS = "fl_elastic"

SAME_HEAD = "fewer full steps, solved head"
"""The strongest plain competitor in the benchmark across rounds."""

READ = "closed form, chosen places"
"""Method that solves a head in closed form at places of the model that it chooses itself."""

MIRRORED = f"{READ}, mirrored"
"""The same, reading the mean features of each image and its mirror image."""

_FULL: Table = {"policy": "full"}
# If clients differ, the aggregates of successive rounds point in different directions. The server takes larger
# steps along what clients agree on, and larger ones still while rounds agree. It tests and sends out the mean of
# its last models. With BatchNorm it never goes further than the clients did.
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
}
"""Methods by their name in the table; settings that are not given have the defaults of a scenario.

Under a deadline each method is charged for what it needs to know. A method that trains everything
needs only the time of its own steps, which it sees in training: it is charged nothing. All others are charged for a
cost profile in each client's first fit, and for a choice in each fit in which not everything fits; ``fedel`` also
for its probes.
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
    # The preset for pretrained models, with full steps instead of elastic ones.
    f"{READ}, moving cut, then steps": _FEWER | _SOLVED | {"read": "auto", "cut": "moving"},
    "closed form, last layer, mirrored": _ONE_PASS | {"read": "mirrored:in:classifier.1@flat"},
    MIRRORED: _ONE_PASS | {"read": "mirrored:auto"},
    f"{MIRRORED}, then steps": _FEWER | _SOLVED | {"read": "mirrored:auto"},
}
"""Methods of one pass: a head on the last layer's input, on the model's input or at chosen places.

"Then steps" trains what is below such a head in the time that is left. With "mirrored" a head reads each image and
its mirror image.
"""

# Updates are sent with 8 bits. The model is sent down with 16, since all clients train from it.
_SMALL: Table = {"codec": "int8", "downlink_codec": "fp16"}


def across_rounds(cut: str) -> dict[str, Table]:
    """Return methods that keep heads or features from round to round, and plain ones to compare with.

    With a solved head, the model is tested as it was when its head was last solved.

    Parameters
    ----------
    cut : str
        Module at which the fixed cut lies: it and all later modules are trained.
    """
    fixed: Table = {"cut": f"fixed:{cut}"}
    return {
        REFERENCE: METHODS[REFERENCE],
        **CLOSED_FORM,
        "fewer full steps, our server": METHODS["fewer full steps, our server"],
        # The strongest plain competitor also gets a head in closed form that is solved again and again.
        SAME_HEAD: _FEWER | _SOLVED,
        "bias only, solved head": {"policy": "bias"} | _SOLVED,
        "last layers, solved head": {"policy": "last_k"} | _SOLVED,
        # Different layers in every fit and an up-to-date head: LISA, with as many layers as a device can afford.
        "random layers, solved head": {"policy": "random"} | _SOLVED,
        # Published methods choose for themselves, and train the head too.
        "timelyfl, solved head": {"peer": "timelyfl"} | _SOLVED,
        "fedel, solved head": {"peer": "fedel"} | _SOLVED,
        "fixed cut, solved head": _FEWER | fixed | _SOLVED,
        "moving cut, solved head": _FEWER | {"cut": "moving"} | _SOLVED,
        "moving cut, solved head, 8 bits": _FEWER | {"cut": "moving"} | _SOLVED | _SMALL,
        "fl_elastic, solved head": _ELASTIC | _SOLVED,
        "fl_elastic, moving cut, solved head": _ELASTIC | {"cut": "moving"} | _SOLVED,
    }
