"""The one family of exceptions of fl_elastic.

Every message says what was wrong, the value that was seen, and what to do about it. Each class also
inherits the builtin that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "ArchiveError",
    "ArchiveVersionError",
    "BudgetError",
    "CheckpointError",
    "DatasetError",
    "ElasticError",
    "FleetError",
    "LaboratoryMissing",
    "MissedCut",
    "ModelError",
    "PlanError",
    "ProfileError",
    "RegistryError",
    "ScenarioError",
    "StaleModelError",
    "StoreError",
    "StreamDataError",
    "StreamError",
    "TrainingError",
    "UpdateError",
]


class ElasticError(Exception):
    """Root of every error that fl_elastic raises on purpose."""

    exit_status = 1
    """That of a command which it ends."""


class LaboratoryMissing(ElasticError, RuntimeError):
    """Something was asked for that fl-elastic-simulations brings, which is not installed."""


class ArchiveError(ElasticError, ValueError):
    """A file of kept state is damaged, too long, or of another kind."""


class ArchiveVersionError(ArchiveError):
    """A file of kept state is whole, and of another version."""


class BudgetError(ElasticError, ValueError):
    """A budget is contradictory or not a positive number."""


class ModelError(ElasticError, ValueError):
    """A model cannot be named, built, or traced into tensor groups."""


class MissedCut(ModelError):
    """The model did not take the way by its cut this time: its code decides anew in every step."""


class PlanError(ElasticError, ValueError):
    """A plan asks for a mode that means nothing or does not fit the model."""


class ProfileError(ElasticError, ValueError):
    """A cost profile cannot be read, or belongs to another model or device."""


class RegistryError(ElasticError, ValueError):
    """A plug-in name is unknown, taken, or not well formed."""


class TrainingError(ElasticError, RuntimeError):
    """Local training cannot go on: no data, or a loss that is not finite."""


class UpdateError(ElasticError, ValueError):
    """A partial update does not fit the manifest, or its bytes are damaged."""


class StaleModelError(UpdateError):
    """Changed tensors arrived that do not fit the model held here; the full model is needed."""


class CheckpointError(ElasticError, RuntimeError):
    """A checkpoint cannot be written or read."""


class ScenarioError(ElasticError, ValueError):
    """A scenario file has a key or a value that means nothing."""


class DatasetError(ElasticError, RuntimeError):
    """A dataset is missing or damaged."""


class FleetError(ElasticError, RuntimeError):
    """A fleet's folder, keys, settings or processes are not as they must be."""


class StoreError(ElasticError, RuntimeError):
    """A sample store cannot be opened, or was asked for something that means nothing."""


class StreamError(ElasticError, RuntimeError):
    """A stream cannot be learned from: a setting, a source, or saved state that means nothing."""


class StreamDataError(StreamError):
    """What a stream reads, or has kept, cannot be used, however often it is started."""

    # EX_DATAERR of sysexits.h: a service that ends with it is not started again.
    exit_status = 65
