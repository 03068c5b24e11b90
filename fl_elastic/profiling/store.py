"""Cost profiles as versioned files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fl_elastic.errors import ArchiveError, ArchiveVersionError, ProfileError
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.profiling.profile import CostProfile, ProfileKey
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state

KIND = Kind("fl_elastic.cost_profile", 8)


def save_profile(profile: CostProfile, path: str | os.PathLike[str]) -> Path:
    """Write ``profile`` to ``path`` atomically; raise ProfileError if that is not possible."""
    try:
        return write_state(path, KIND, profile)
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
        The key that the profile must be valid for.

    Raises
    ------
    ProfileError
        If the file is missing, damaged, of another version, or does not fit ``key``.
    """
    remedy = "delete it to measure anew"
    try:
        profile = read_state(CostProfile, path, KIND)
        _check_graph(profile.graph)
    except OSError as error:
        raise ProfileError(f"cannot read cost profile {path}: {error.strerror}") from None
    except ArchiveVersionError as error:
        raise ProfileError(
            f"cost profile {path} is of another release ({error}); {remedy}"
        ) from None
    except (ArchiveError, ProfileError) as error:
        raise ProfileError(f"cost profile {path} is damaged ({error}); {remedy}") from None
    if key is not None and (differences := key.differences(profile.key)):
        raise ProfileError(f"cost profile {path} was measured for another case: "
                           f"{'; '.join(differences)}; {remedy}")  # fmt: skip
    return profile


def _check_graph(graph: BackwardGraph) -> None:
    """Raise ProfileError unless shapes are possible, indices are inside the graph and groups have an owner."""
    groups, nodes = graph.groups, graph.nodes
    for group in groups:
        negative = any(length < 0 for shape in group.shapes for length in shape)
        if negative or len(group.shapes) != len(group.parameters):
            raise ProfileError(f"group {group.name!r} has impossible shapes {group.shapes}")
        missing = len(group.copies) not in (0, len(group.parameters))
        if missing or min((*group.copies, group.statistics)) < 0:
            raise ProfileError(
                f"group {group.name!r} has impossible counts {group.copies}, {group.statistics}"
            )
    for index, node in enumerate(nodes):
        owner_known = node.group is None or 0 <= node.group < len(groups)
        if not owner_known or not all(index < below < len(nodes) for below in node.inputs):
            raise ProfileError(f"node {index} points outside the graph")
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
