"""``fl-elastic plan MODEL --read``: where a head can read in a model, at what cost and with what error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fl_elastic.cli.planned import random_batch
from fl_elastic.cli.tables import print_table
from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import counted
from fl_elastic.groups.forward import batch_shape
from fl_elastic.laboratory import from_laboratory
from fl_elastic.readout.best_places import EXAMPLES, PlaceWorth, choose_places
from fl_elastic.readout.place import MOST_FEATURES, Place
from fl_elastic.registry import first_line, from_module
from fl_elastic.training.place_sample import place_sample
from fl_elastic.training.sums_size import sums_bytes

_WARM = 2
# Number of examples of a client whose sums have their largest size; with few examples they are smaller.
_MANY = 10**6


def describe_places(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    classes: int,
    data: str | None,
    wanted: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Return as JSON values the costs of each place on this machine and, with data, its held-out error.

    Parameters
    ----------
    model : nn.Module
        The model; it is left unchanged.
    shape : tuple of int
        Shape of one input.
    batch_size : int
        Examples per forward pass.
    classes : int
        Number of classes of random targets.
    data : str, optional
        A data set of the laboratory, or ``module:callable`` that returns a loader. By default inputs are random and
        no error is computed.
    wanted : tuple of int, optional
        Shape of one input that a loader of ``module:callable`` must have; by default any.

    Raises
    ------
    ModelError
        If the callable raises an error, or its inputs have another shape.
    RegistryError
        If there is no such data set or callable.
    LaboratoryMissing
        If the laboratory, which knows data sets by name, is not installed.
    """
    loader: Iterable[Batch]
    if data is None:
        loader = [random_batch(shape, batch_size, classes) for _ in range(2)]
    else:
        loader = _loader(data, shape, batch_size)
        if wanted is not None:
            _refuse_other_inputs(data, loader, wanted)
    # Warm up, so that one-time work of the first pass is not counted.
    place_sample(model, loader, examples=_WARM, most_features=MOST_FEATURES)
    found = place_sample(model, loader, examples=EXAMPLES, most_features=MOST_FEATURES)
    worth: dict[Place, PlaceWorth] = {}
    unions: tuple[PlaceWorth, ...] = ()
    best = None
    if data is not None:
        choice = choose_places(found.sample, most_features=MOST_FEATURES)
        worth = {each.places[0]: each for each in choice.single}
        unions, best = choice.unions[1:], choice.best.name
    longest = max(found.seconds.values())
    rows = [
        {
            "name": str(place),
            "features": numbers.shape[1],
            "seconds": found.seconds[place],
            "share": found.seconds[place] / longest if longest > 0 else 1.0,
            "sums_bytes": sums_bytes(numbers.shape[1], found.sample.targets.shape[1], _MANY),
            "error": worth[place].error if place in worth else None,
            "penalty": worth[place].penalty if place in worth else None,
        }
        for place, numbers in found.sample.rows.items()
    ]
    return {
        "examples": len(found.sample.targets),
        "places": rows,
        "unions": [
            {"name": union.name, "features": union.features, "error": union.error}
            for union in unions
        ],
        "best": best,
    }


def print_places(model: str, result: dict[str, Any]) -> None:
    """Print the table, and the best places."""
    known = result["best"] is not None
    table = Table(title=f"{model}: where a head may read, input first")
    table.add_column("place", overflow="fold")
    for column in ("features", "ms an example", "share of the pass", "sums, kB"):
        table.add_column(column, justify="right")
    if known:
        table.add_column("held-out error", justify="right")
    for place in result["places"]:
        cells = [
            place["name"], f"{place['features']}", f"{1e3 * place['seconds']:.3f}",
            f"{place['share']:.0%}", f"{place['sums_bytes'] / 1e3:.0f}",
        ]  # fmt: skip
        table.add_row(*cells, *([f"{place['error']:.3f}"] if known else []))
    console = Console()
    print_table(table, console)
    if not known:
        console.print("give --data to see what each is worth", highlight=False)
        return
    for union in result["unions"]:
        console.print(
            f"{union['error']:.3f} with {union['features']} features from {union['name']}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print(
        f"best of {result['examples']} examples: {result['best']}", highlight=False, soft_wrap=True
    )


def _loader(data: str, shape: tuple[int, ...], batch_size: int) -> Iterable[Batch]:
    if ":" not in data:
        batches: Iterable[Batch] = from_laboratory("dataset_batches")(
            data, shape, batch_size, EXAMPLES
        )
        return batches
    make = from_module("data", data)
    try:
        made = make() if callable(make) else make
    # The callable is foreign code and may raise anything.
    except Exception as error:
        raise ModelError(f"data {data!r}: {first_line(error)}") from error
    if not isinstance(made, Iterable) or isinstance(made, (str, torch.Tensor)):
        raise ModelError(
            f"data {data!r} gives a {type(made).__name__}, expected a loader of batches (inputs, targets)"
        )
    return made if not hasattr(made, "__next__") else list(made)


def _refuse_other_inputs(data: str, loader: Iterable[Batch], wanted: tuple[int, ...]) -> None:
    """Raise ModelError if the first input tensor of a loader has examples of another shape."""
    found = next((batch_shape(batch)[1:] for batch, _ in counted(loader)), wanted)
    if found != wanted:
        shape = ",".join(map(str, found))
        raise ModelError(
            f"data {data!r}: inputs are of shape {shape}, not {wanted}: give that as --input, or leave it out"
        )
