"""State that a client keeps between rounds: in memory, or in a folder that outlives its process.

The folder is ``client-ID`` in the client's ``state_dir``. Without a folder, a process that lives for one message
keeps only the importance of groups, in Flower's context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ArchiveError, ProfileError, StaleModelError, UpdateError
from fl_elastic.planning.request import NO_MEMORY
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.profiling.profile import ProfileKey
from fl_elastic.state.archive import archive_bytes, archive_of
from fl_elastic.state.codec import from_archive, read_state, to_archive, write_state
from fl_elastic.state.files import remove_leftovers
from fl_elastic.state.rows import delete
from fl_elastic.training import SelectionState
from fl_elastic.training.selection import SELECTION
from fl_elastic.update import CODECS, Manifest, PartialUpdate, decode, encode
from fl_elastic.update.frame import peek
from fl_elastic.update.manifest import hex_of
from fl_elastic.update.model_wire import decode_weights

if TYPE_CHECKING:
    from fl_elastic.update.feedback import ErrorFeedback
    from fl_elastic.update.model_store import ModelStore


_LOG = logging.getLogger("fl_elastic")
# Names of the record and its entry in the state of Flower's context.
_SELECTION, _STATE = "fl_elastic.selection", "state"


# Profiles of clients without a folder: simulated clients are made anew for each message, in processes that stay.
# The key includes a description of the model, because the profile key does not distinguish modules without
# parameters.
_PROFILES: dict[tuple[ProfileKey, str], CostProfile] = {}
_MOST_PROFILES = 16


def _described(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}: {model}"


def _remove(path: Path) -> None:
    """Delete a file, with a warning if the disk does not permit it."""
    try:
        delete(path)
    except OSError as error:
        _LOG.warning("cannot remove %s: %s", path, error.strerror)


def features_of_tests(path: Path) -> Path:
    """Return the file of the test data's features, beside that of the training data's."""
    return path.with_name(f"test-{path.name}")


class ClientState:
    """State that one client keeps for one model.

    State that is missing, damaged or of another model is computed anew. If the disk is full, nothing is kept and
    the round goes on.

    Parameters
    ----------
    directory : Path or None
        The folder, made when it is first needed; with None everything is held in memory.
    manifest : Manifest
        Manifest of the model; files of several models may share the folder.
    profile : CostProfile, optional
        Costs of the model, if they are known.

    Attributes
    ----------
    selection : SelectionState
        Importance of groups, and for how many rounds each was left out.
    """

    def __init__(
        self, directory: Path | None, manifest: Manifest, profile: CostProfile | None = None
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self._profile = profile
        if directory is not None:
            remove_leftovers(directory)
        self.selection = self._load_selection()
        self._feedback: ErrorFeedback | None = None

    def _path(self, name: str, ending: str) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / f"{name}-{self.manifest.hash}.{ending}"

    def moved(self, directory: Path | None) -> ClientState:
        """Return the state kept in another folder, with the cost profile that is known already."""
        return ClientState(directory, self.manifest, self._profile)

    @property
    def features(self) -> Path | None:
        """File of the features at the fleet's cut: one for all models, because features take most of the disk.

        The file records which model its features are of; a model whose head grows keeps its features.
        """
        return None if self.directory is None else self.directory / "features.db"

    def forget_features(self) -> None:
        """Remove the features, and those of the test data."""
        if self.features is None:
            return
        for path in (self.features, features_of_tests(self.features)):
            _remove(path)

    def profile(self, key: Callable[[], ProfileKey], model: nn.Module) -> CostProfile | None:
        """Return the cost profile, if one is known; ``key()`` returns the key by which it is looked up."""
        if self._profile is None:
            self._profile = self._load_profile(key(), model)
        return self._profile

    def _load_profile(self, key: ProfileKey, model: nn.Module) -> CostProfile | None:
        path = self._path("profile", "state")
        try:
            return (
                _PROFILES.get((key, _described(model))) if path is None else load_profile(path, key)
            )
        except ProfileError:
            return None

    def keep_profile(self, profile: CostProfile, model: nn.Module) -> None:
        """Keep the cost profile in the folder; without a folder, in this process for all clients that it fits."""
        self._profile = profile
        path = self._path("profile", "state")
        try:
            if path is not None:
                save_profile(profile, path)
            else:
                _PROFILES[profile.key, _described(model)] = profile
                while len(_PROFILES) > _MOST_PROFILES:
                    del _PROFILES[next(iter(_PROFILES))]
        except ProfileError as error:
            _LOG.warning("%s; it is measured again next time", error)

    def forget_profile(self) -> None:
        """Remove the cost profile, so that costs are measured again when they are needed next."""
        self._profile = None
        path = self._path("profile", "state")
        if path is not None:
            _remove(path)
        else:
            _PROFILES.clear()

    def _load_selection(self) -> SelectionState:
        path = self._path("selection", "state")
        if path is None:
            return SelectionState(known=False)
        try:
            return read_state(SelectionState, path, SELECTION)
        except (OSError, ArchiveError):
            return SelectionState(known=False)

    def keep_in(self, context: RecordDict) -> None:
        """Keep the importance of groups in the state of Flower's context, which lasts for a run."""
        archive = archive_bytes(SELECTION, to_archive(self.selection))
        context[_SELECTION] = ConfigRecord({_STATE: archive})

    def recall_from(self, context: RecordDict) -> None:
        """Use the importance in the state of Flower's context, unless a folder holds some."""
        kept = context.get(_SELECTION)
        said = kept.get(_STATE) if isinstance(kept, ConfigRecord) else None
        if self.selection.known or not isinstance(said, bytes):
            return
        # If another program wrote to this entry, it is ignored and importance is computed anew.
        with suppress(ArchiveError):
            self.selection = from_archive(SelectionState, archive_of(said, SELECTION))

    def forget_examples(self, request: str) -> None:
        """Delete the policy's state from earlier rounds and the residuals of a lossy codec.

        Both may depend on examples that must be forgotten.

        Parameters
        ----------
        request : str
            Digest of the examples. The codec's residuals are deleted once for each digest.
        """
        self.selection.memory = NO_MEMORY
        path = self._path("feedback", "state")
        if self._feedback is not None or (path is not None and path.exists()):
            self.feedback.forget(request)

    def keep_selection(self, *, wanted: bool = True) -> None:
        """Keep the importance of groups, and for how many rounds each was left out.

        No file is made if the policy does not need it (``wanted`` is False) and there is nothing to keep.
        """
        path = self._path("selection", "state")
        try:
            if path is not None and (wanted or self.selection.remembers or path.exists()):
                # A round need not wait for the disk: if power is lost, importance is computed anew.
                write_state(path, SELECTION, self.selection, durable=False)
        except OSError as error:
            _LOG.warning("cannot keep importance in %s: %s", path, error.strerror)

    @property
    def feedback(self) -> ErrorFeedback:
        """The error that a lossy codec made in earlier updates."""
        if self._feedback is None:
            # Imported here: lossless codecs do not need it.
            from fl_elastic.update.feedback import ErrorFeedback

            path = self._path("feedback", "state")
            self._feedback = (
                ErrorFeedback(manifest=self.manifest)
                if path is None
                else ErrorFeedback.load(str(path), self.manifest)
            )
        return self._feedback

    def encoded(self, update: PartialUpdate, codec: str) -> bytes:
        """Return the packed update; with a lossy codec, after adding the error of earlier updates."""
        if not CODECS.make(codec).lossy:
            return encode(update, self.manifest, codec)
        corrected = self.feedback.corrected(update)
        packed = encode(corrected, self.manifest, codec)
        self.feedback.sent(corrected, decode(packed, self.manifest))
        path = self._path("feedback", "state")
        if path is not None:
            self.feedback.save(path)
        return packed

    def received(self, packed: bytes, model: nn.Module) -> tuple[dict[str, NDArray[Any]], int]:
        """Return weights and version of a packed model; changed tensors are combined with the model kept here.

        Raises
        ------
        StaleModelError
            If only changed tensors came and they do not fit the model kept here.
        UpdateError
            If the bytes are damaged or of another model.
        """
        self._follow(packed, model)
        try:
            return decode_weights(packed, self.manifest)
        except StaleModelError:
            # The kept model is read only when it is needed.
            store = self._model_store()
            known = None if store is None else store.load(self.manifest)
            return decode_weights(packed, self.manifest, known)

    def received_list(
        self, arrays: list[NDArray[Any]], model: nn.Module, names: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the weights of a model sent as a list of arrays, which may end with the digest of its frozen base.

        Parameters
        ----------
        arrays : list of ndarray
            The arrays in the order of the model's tensors.
        model : nn.Module
            The model here.
        names : sequence of str, optional
            Names under which the server sent the arrays. The names ``0``, ``1`` and so on are ignored; any others
            must be those of the model, in order.

        Raises
        ------
        UpdateError
            If they are of another model, or of one with another frozen base.
        """
        if self.manifest.base and len(arrays) != len(self.manifest):
            whole = Manifest.of(model, whole=True)
            if len(arrays) == len(whole):
                self.go_by(whole)
            elif len(arrays) == len(self.manifest) + 1:
                self.manifest.check_base(hex_of(np.asarray(arrays[-1])))
                arrays = arrays[:-1]
        if len(arrays) != len(self.manifest):
            raise UpdateError(
                f"got {len(arrays)} arrays, the model has {len(self.manifest)} tensors"
            )
        places = [str(place) for place in range(len(arrays))]
        if names is not None and list(names) != places:
            for name, here in zip(names, self.manifest.names, strict=False):
                if name != here:
                    raise UpdateError(
                        f"the server has tensor {name!r} where this model has {here!r}: begin with "
                        "initial_arrays(model), whose order is the model's"
                    )
        return dict(zip(self.manifest.names, arrays, strict=True))

    def _follow(self, packed: bytes, model: nn.Module) -> None:
        """Switch to the manifest of the whole model if the server sends its frozen base as well."""
        if not self.manifest.base:
            return
        said = peek(packed)
        whole = Manifest.of(model, whole=True)
        if said.get("manifest") == whole.hash != self.manifest.hash:
            _LOG.warning(
                "the server sends the frozen part of the model as well, %s of %s tensors: to send only what is "
                "trained, begin with fl_elastic.flower.initial_arrays(model)",
                len(whole) - len(self.manifest), len(whole),
            )  # fmt: skip
            self.go_by(whole)
        elif said.get("manifest") == self.manifest.hash and "base" not in said:
            _LOG.warning(
                "the server does not say which frozen base its model has, so it cannot be compared with this one: "
                "begin with fl_elastic.flower.initial_arrays(model)"
            )

    def go_by(self, manifest: Manifest) -> None:
        """Use another manifest from now on, with the state that is kept for it."""
        another = manifest.hash != self.manifest.hash
        self.manifest = manifest
        if another:
            self.selection, self._feedback = self._load_selection(), None

    def keep_model(self, weights: dict[str, NDArray[Any]], version: int) -> bool:
        """Keep a model for later calls of `received`; return whether it is on disk."""
        store = self._model_store()
        return store is not None and store.save(weights, version)

    def _model_store(self) -> ModelStore | None:
        from fl_elastic.update.model_store import ModelStore

        path = self._path("model", "bin")
        return None if path is None else ModelStore(path)
