"""The last model that a client received, kept on disk so that the server need only send changed tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, UpdateError
from fl_elastic.state.archive import Kind, read_archive, write_archive
from fl_elastic.update.checks import MAX_VERSION, check_count
from fl_elastic.update.manifest import Manifest

_LOG = logging.getLogger(__name__)
_KIND = Kind("fl_elastic.model")
# Bytes per tensor for its name and its row in the archive's table.
_OVERHEAD = 4096


class ModelStore:
    """One model and its version in a checksummed file.

    Numbers are kept exactly as received.

    Parameters
    ----------
    path : path-like
        The file; its folder is created when the first model is saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load(self, manifest: Manifest) -> tuple[dict[str, NDArray[Any]], int] | None:
        """Return weights and version; None if the file is missing, damaged or of another model."""
        try:
            return _read(self.path, manifest)
        except FileNotFoundError:
            return None
        except (OSError, ArchiveError, UpdateError) as error:
            _LOG.warning("the model in %s is not used: %s", self.path, error)
            return None

    def save(self, weights: Mapping[str, NDArray[Any]], version: int) -> bool:
        """Write the whole model, atomically; return whether that was possible, and log it if not.

        Raises
        ------
        UpdateError
            If a weight is not finite, or the version is not an integer in range.
        """
        _check(weights, version)
        try:
            # A damaged file costs no more than the next download of the whole model.
            write_archive(self.path, _KIND, {"version": int(version)}, weights, durable=False)
        except OSError as error:
            # The next round then needs a full download; the present round is not affected.
            _LOG.warning("cannot keep the model in %s: %s", self.path, error.strerror)
            return False
        return True


def _check(weights: Mapping[str, NDArray[Any]], version: object) -> None:
    check_count("version", version, 0, MAX_VERSION)
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise UpdateError(f"tensor {name[:80]!r} holds NaN or infinite values")


def _read(path: Path, manifest: Manifest) -> tuple[dict[str, NDArray[Any]], int]:
    whole = {name: np.dtype(manifest.array_dtype(name)) for name in manifest.names}
    most = sum(
        int(np.prod(manifest.shape(n), dtype=np.int64)) * t.itemsize for n, t in whole.items()
    )
    found = read_archive(path, _KIND, most=most + _OVERHEAD * (len(manifest) + 1))
    manifest.check_weights(found.arrays)
    for name, dtype in whole.items():
        if found.arrays[name].dtype != dtype:
            raise UpdateError(f"tensor {name[:80]!r} is {found.arrays[name].dtype}, not {dtype}")
    _check(found.arrays, found.facts.get("version"))
    return {name: found.arrays[name] for name in manifest.names}, found.facts["version"]
