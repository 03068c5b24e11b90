"""Error feedback: the error of encoding an update is added to the next update."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, UpdateError
from fl_elastic.state.archive import Kind, read_archive, write_archive
from fl_elastic.update.checks import MAX_VERSION, check_count
from fl_elastic.update.manifest import Manifest, Role
from fl_elastic.update.partial import PartialUpdate, trained_part

_LOG = logging.getLogger(__name__)
_KIND = Kind("fl_elastic.residuals")
# Version that stands for "no update was sent yet".
_NONE = -1
_VERSION, _FORGOT = "version", "forgot"
# Bytes per tensor for its name and its row in the archive's table.
_OVERHEAD = 4096


class ErrorFeedback:
    r"""Keeps each parameter's error from a lossy codec, :math:`e \leftarrow (\Delta + e) - C(\Delta + e)`.

    With codecs that write every number sooner or later (top-k, rounding), the sum of decoded updates differs from
    the sum of true updates only by a bounded residual (Seide et al. 2014, Karimireddy et al. 2019).

    Versions of the model increase from round to round. If an update does not start from a higher version than the
    last one, it belongs to another run, or the server has returned to an earlier model: earlier errors are then not
    added.

    Parameters
    ----------
    residuals : dict of str to ndarray, optional
        Errors so far, in the tensors' shapes.
    manifest : Manifest, optional
        Distinguishes parameters from running statistics, for which no residual is kept; by default all tensors
        count as parameters.
    version : int
        Version of the model from which the last update that was sent starts; -1 if none was sent.
    forgot : str
        Name with which `forget` was last called; empty if it never was.

    Examples
    --------
    >>> feedback = ErrorFeedback()
    >>> update = PartialUpdate({"w": np.array([1.0, 0.25])}, {"w": 1}, num_examples=1, base_version=1)
    >>> received = PartialUpdate({"w": np.array([1.0, 0.0])}, {"w": 1}, num_examples=1, base_version=1)
    >>> feedback.sent(feedback.corrected(update), received)
    >>> feedback.corrected(replace(update, base_version=2)).deltas["w"].tolist()
    [1.0, 0.5]
    """

    def __init__(
        self,
        residuals: Mapping[str, NDArray[np.float32]] | None = None,
        manifest: Manifest | None = None,
        version: int = _NONE,
        forgot: str = "",
    ) -> None:
        self.residuals = dict(residuals or {})
        self.version, self.forgot = version, forgot
        self._manifest = manifest

    def forget(self, name: str) -> None:
        """Drop all errors so far, because they depend on examples that must be forgotten; once for each name."""
        if self.forgot != name:
            self.residuals, self.forgot = {}, name

    def corrected(self, update: PartialUpdate) -> PartialUpdate:
        """Return ``update`` with earlier errors added to the elements that it trained.

        Raises
        ------
        UpdateError
            If a residual has another shape than its delta.
        """
        if update.base_version <= self.version:
            self.residuals, self.version = {}, _NONE
        deltas: dict[str, NDArray[Any]] = {}
        for name, delta in update.deltas.items():
            deltas[name] = _as_written(delta)
            residual = self.residuals.get(name)
            if residual is None:
                continue
            if residual.shape != np.shape(delta):
                raise UpdateError(
                    f"residual of {name!r} has shape {residual.shape}, its delta {np.shape(delta)}: "
                    "forget the residuals of another model"
                )
            part = trained_part(update, name)
            deltas[name] = np.asarray(
                deltas[name] + (residual if part is None else residual * part), dtype=np.float32
            )
        return replace(update, deltas=deltas)

    def sent(self, corrected: PartialUpdate, decoded: PartialUpdate) -> None:
        """Store the encoding error of ``corrected``, given the update that the receiver decodes.

        Residuals of elements that were not trained are unchanged.

        Raises
        ------
        UpdateError
            If the two hold different tensors or numbers that are not finite; nothing is stored then.
        """
        if set(corrected.deltas) != set(decoded.deltas):
            odd = sorted(set(corrected.deltas) ^ set(decoded.deltas))
            raise UpdateError(f"the sent and the decoded update differ in the tensors {odd[:3]}")
        lost = {
            name: self._lost(name, corrected, decoded)
            for name in corrected.deltas
            if self._manifest is None or self._manifest.role(name) is Role.PARAMETER
        }
        self.version = corrected.base_version
        for name, residual in lost.items():
            if residual.any():
                self.residuals[name] = residual
            else:
                self.residuals.pop(name, None)

    def _lost(
        self, name: str, corrected: PartialUpdate, decoded: PartialUpdate
    ) -> NDArray[np.float32]:
        whole, arrived = _as_written(corrected.deltas[name]), _as_written(decoded.deltas[name])
        if whole.shape != arrived.shape:
            raise UpdateError(f"{name!r} was sent as {whole.shape} and arrived as {arrived.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            lost = np.asarray(whole - arrived, dtype=np.float32)
        if not np.isfinite(lost).all():
            raise UpdateError(f"the encoding error of {name!r} is not finite")
        part, before = trained_part(corrected, name), self.residuals.get(name)
        if part is None or before is None:
            return lost
        return np.where(part, lost, before)

    def save(self, path: str | os.PathLike[str]) -> bool:
        """Write the residuals to a file, atomically; return whether that was possible, and log it if not."""
        try:
            facts = {_VERSION: self.version, _FORGOT: self.forgot}
            write_archive(path, _KIND, facts, self.residuals)
        except OSError as error:
            # Only the residuals are lost, not the round's training.
            _LOG.warning("cannot keep the update's residuals in %s: %s", path, error.strerror)
            return False
        return True

    @classmethod
    def load(cls, path: str | os.PathLike[str], manifest: Manifest) -> ErrorFeedback:
        """Return the residuals in a file of `save`; empty if the file is missing, damaged or of another model."""
        try:
            residuals, version, forgot = _read(path, manifest)
            return cls(residuals, manifest, version, forgot)
        except FileNotFoundError:
            return cls(manifest=manifest)
        except (OSError, ArchiveError, UpdateError) as error:
            _LOG.warning("residuals in %s are not used: %s", path, error)
            return cls(manifest=manifest)


def _as_written(delta: NDArray[Any]) -> NDArray[np.float32]:
    """Return the delta in fp32, as every codec receives it."""
    with np.errstate(over="ignore"):
        return np.asarray(delta, dtype=np.float32)


def _read(
    path: str | os.PathLike[str], manifest: Manifest
) -> tuple[dict[str, NDArray[np.float32]], int, str]:
    most = 4 * sum(int(np.prod(shape, dtype=np.int64)) for shape in manifest.shapes)
    most += _OVERHEAD * (len(manifest) + 1)
    found = read_archive(path, _KIND, most=most)
    residuals, version = dict(found.arrays), found.facts.get(_VERSION, "")
    check_count("version", version, _NONE, MAX_VERSION)
    for name, residual in residuals.items():
        fits = name in manifest.index and manifest.role(name) is Role.PARAMETER
        if not fits or residual.shape != manifest.shape(name) or residual.dtype != np.float32:
            raise UpdateError(f"tensor {name[:80]!r} is of another model")
        if not np.isfinite(residual).all():
            raise UpdateError(f"tensor {name[:80]!r} is not finite")
    return residuals, int(version), str(found.facts.get(_FORGOT, ""))
