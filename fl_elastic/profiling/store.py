"""Cost profiles as versioned files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, ArchiveVersionError, ProfileError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import (
    BackwardGraph,
    BackwardNode,
    Block,
    Cut,
    GroupKind,
    Reader,
    Width,
)
from fl_elastic.profiling.profile import CostProfile, ModeCosts, ProfileKey, SavedTensors
from fl_elastic.storage import Archive, Kind, read_archive, write_archive

__all__ = ["load_or_measure", "load_profile", "save_profile"]

KIND = Kind("fl_elastic.cost_profile", 5)

_ARRAYS = (
    "node_update_seconds",
    "node_path_seconds",
    "optimizer_seconds",
    "forward_seconds",
    "node_saved_bytes",
    "cut_plain_seconds",
    "cut_inference_seconds",
    "node_lean",
)
_NUMBERS = (
    "fixed_seconds",
    "optimizer_bytes_per_weight",
    "lookup_seconds",
    "lookup_seconds_per_value",
)
_INDICES = ("nodes", "tensors", "outputs", "channels_last")
_RATIOS = ("update_ratio", "path_ratio")


def save_profile(profile: CostProfile, path: str | os.PathLike[str]) -> Path:
    """Write ``profile`` to ``path``, atomically; raises ProfileError if that is not possible."""
    facts: dict[str, Any] = {
        "key": asdict(profile.key),
        "groups": [asdict(group) for group in profile.graph.groups],
        "nodes": [asdict(node) for node in profile.graph.nodes],
        "blocks": [asdict(block) for block in profile.graph.blocks],
        "cuts": [asdict(cut) for cut in profile.graph.cuts],
        "widths": [asdict(width) for width in profile.graph.widths],
        "estimated": profile.estimated,
    }
    facts |= {name: getattr(profile, name) for name in _NUMBERS}
    arrays = {name: getattr(profile, name) for name in _ARRAYS}
    if profile.modes is not None:
        facts["modes"] = [str(mode) for mode in profile.modes.modes]
        arrays |= {f"modes.{name}": getattr(profile.modes, name) for name in _RATIOS}
    if profile.saved is not None:
        names = [field.name for field in fields(SavedTensors)]
        arrays |= {f"saved.{name}": getattr(profile.saved, name) for name in names}
    try:
        return write_archive(path, KIND, facts, arrays)
    except (OSError, ArchiveError) as error:
        why = getattr(error, "strerror", None) or error
        raise ProfileError(f"cannot write cost profile {path}: {why}") from None


def load_profile(path: str | os.PathLike[str], key: ProfileKey | None = None) -> CostProfile:
    """Read a profile written by `save_profile`.

    Parameters
    ----------
    path : path-like
        The file.
    key : ProfileKey, optional
        What the profile must be valid for.

    Raises
    ------
    ProfileError
        If the file is missing, damaged, of another version, or does not fit ``key``.
    """
    remedy = "delete it to measure anew"
    try:
        profile = _profile(read_archive(path, KIND))
    except OSError as error:
        raise ProfileError(f"cannot read cost profile {path}: {error.strerror}") from None
    except ArchiveVersionError as error:
        raise ProfileError(
            f"cost profile {path} is of another release ({error}); {remedy}"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProfileError(f"cost profile {path} is damaged ({error}); {remedy}") from None
    if key is not None and (differences := key.differences(profile.key)):
        raise ProfileError(f"cost profile {path} was measured for another case: "
                           f"{'; '.join(differences)}; {remedy}")  # fmt: skip
    return profile


def _mode_costs(stored: Archive, groups: int) -> ModeCosts | None:
    names = stored.facts.get("modes")
    if names is None:
        return None
    modes = tuple(Mode.parse(text) for text in names)
    tables = [_numbers(stored.arrays[f"modes.{name}"]) for name in _RATIOS]
    if any(table.shape != (groups, len(modes)) for table in tables):
        raise ProfileError("its modes do not have one row per group")
    return ModeCosts(modes, tables[0], tables[1])


def _saved_tensors(stored: Archive, nodes: int) -> SavedTensors | None:
    arrays = stored.under("saved.")
    if not arrays:
        return None
    whole = {name: _whole(arrays[name]) for name in _INDICES}
    saved = SavedTensors(tensor_bytes=_numbers(arrays["tensor_bytes"]), **whole)
    if len(saved.outputs) != nodes:
        raise ProfileError("what nodes keep does not have one output per node")
    return saved


def _numbers(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype.kind not in "iuf":
        raise ProfileError(f"costs of type {array.dtype} are no numbers")
    return array.astype(np.float64)


def _whole(array: NDArray[Any]) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise ProfileError(f"indices of type {array.dtype} are no whole numbers")
    return array.astype(np.int64)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ProfileError(f"parameter name {value!r} is not a text")
    return value


def _index(value: object) -> int | None:
    """Return a group index as it was stored; `True` and 1.0 are none, although they equal 1."""
    if value is not None and type(value) is not int:
        raise ProfileError(f"group index {value!r} is not a whole number")
    return value


def _profile(stored: Archive) -> CostProfile:
    document = stored.facts
    groups = tuple(
        TensorGroup(
            name=str(group["name"]),
            parameters=tuple(_text(name) for name in group["parameters"]),
            shapes=tuple(tuple(int(n) for n in shape) for shape in group["shapes"]),
            kind=GroupKind(group["kind"]),
        )
        for group in document["groups"]
    )
    nodes = tuple(
        BackwardNode(
            name=str(node["name"]),
            group=_index(node["group"]),
            inputs=tuple(int(n) for n in node["inputs"]),
            shape=_shape(node["shape"]),
            module=str(node["module"]),
        )
        for node in document["nodes"]
    )
    cuts = tuple(
        Cut(
            module=str(cut["module"]),
            at_input=bool(cut["at_input"]),
            node=int(cut["node"]),
            groups_above=int(cut["groups_above"]),
            skipped=tuple((str(name), _shape(shape)) for name, shape in cut["skipped"]),
        )
        for cut in document["cuts"]
    )
    blocks = tuple(
        Block(str(block["module"]), int(block["output_node"]), int(block["input_node"]))
        for block in document["blocks"]
    )
    # None where nobody asked for narrower models.
    widths = tuple(_width(width) for width in document.get("widths", ()))
    _check_graph(groups, nodes, cuts, blocks)
    _check_widths(widths, len(nodes))
    key = document["key"] | {"batch_shape": tuple(int(n) for n in document["key"]["batch_shape"])}
    values: dict[str, Any] = {n: _numbers(stored.arrays[n]) for n in _ARRAYS}
    values |= {name: float(document[name]) for name in _NUMBERS}
    return CostProfile(
        key=ProfileKey(**key),
        graph=BackwardGraph(groups, nodes, cuts, blocks, widths),
        modes=_mode_costs(stored, len(groups)),
        saved=_saved_tensors(stored, len(nodes)),
        estimated=bool(document["estimated"]),
        **values,
    )


def _width(width: Any) -> Width:
    return Width(
        name=str(width["name"]),
        size=int(width["size"]),
        unit=int(width["unit"]),
        makers=tuple(str(module) for module in width["makers"]),
        keepers=tuple(str(module) for module in width["keepers"]),
        readers=tuple(
            Reader(str(reader["module"]), int(reader["repeat"]), str(reader["norm"]))
            for reader in width["readers"]
        ),
        holding=tuple(int(node) for node in width["holding"]),
        touching=tuple(int(node) for node in width["touching"]),
    )


def _check_widths(widths: tuple[Width, ...], nodes: int) -> None:
    """Raise ProfileError unless every width has units, and its nodes lie in the graph."""
    for width in widths:
        counts = (width.size, width.unit, *(reader.repeat for reader in width.readers))
        inside = all(0 <= node < nodes for node in (*width.holding, *width.touching))
        if min(counts) < 1 or not inside:
            raise ProfileError(f"the width {width.name!r} lies outside the graph")


def _shape(lengths: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in lengths)


def _check_graph(
    groups: tuple[TensorGroup, ...],
    nodes: tuple[BackwardNode, ...],
    cuts: tuple[Cut, ...],
    blocks: tuple[Block, ...],
) -> None:
    """Raise ProfileError unless shapes are possible, indices stay inside and groups have an owner."""
    for group in groups:
        negative = any(length < 0 for shape in group.shapes for length in shape)
        if negative or len(group.shapes) != len(group.parameters):
            raise ProfileError(f"group {group.name!r} has impossible shapes {group.shapes}")
    for index, node in enumerate(nodes):
        owner_known = node.group is None or 0 <= node.group < len(groups)
        if not owner_known or not all(index < below < len(nodes) for below in node.inputs):
            raise ProfileError(f"node {index} points outside the graph")
    for cut in cuts:
        if not 0 <= cut.node < len(nodes) or not 0 < cut.groups_above < len(groups):
            raise ProfileError(f"the cut at {cut.module!r} lies outside the graph")
    for block in blocks:
        if not 0 <= block.output_node < block.input_node < len(nodes):
            raise ProfileError(f"the block {block.module!r} lies outside the graph")
    owned = {node.group for node in nodes if node.group is not None}
    if not groups or len(owned) != len(groups):
        raise ProfileError(f"{len(owned)} of {len(groups)} groups are owned by a node")


def load_or_measure(
    path: str | os.PathLike[str], key: ProfileKey, measure: Callable[[], CostProfile]
) -> CostProfile:
    """Return the profile stored at ``path`` if it fits ``key``; else measure, store and return it."""
    if Path(path).exists():
        try:
            return load_profile(path, key)
        except ProfileError:
            # A stale or damaged cache costs only the fifteen steps of measuring it again.
            pass
    profile = measure()
    save_profile(profile, path)
    return profile
