"""The one family of exceptions of fl_elastic.

Every message says what was wrong, which value was seen, and what to do about it. Each class also inherits from the
builtin exception that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Root of every error that fl_elastic raises on purpose."""

    exit_status = 1
    """Exit status of a command that ends with this error."""


class LaboratoryMissing(ElasticError, RuntimeError):
    """A requested feature is part of fl-elastic-simulations, which is not installed."""


class ArchiveError(ElasticError, ValueError):
    """A state file is damaged, too long, or of another kind."""


class ArchiveVersionError(ArchiveError):
    """A state file is intact but of another version."""


class BudgetError(ElasticError, ValueError):
    """A budget is contradictory or not a positive number."""


class ModelError(ElasticError, ValueError):
    """A model cannot be named, built, or traced into tensor groups."""


class MissedCut(ModelError):
    """The model did not pass through its cut this time, because its code takes another path in some steps."""


class PlanError(ElasticError, ValueError):
    """A plan asks for a mode that is invalid or does not fit the model."""


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
    """A scenario file has an invalid key or value."""


class DatasetError(ElasticError, RuntimeError):
    """A dataset is missing or damaged."""


class FleetError(ElasticError, RuntimeError):
    """A fleet's folder, keys, settings or processes are in a wrong state."""


class StoreError(ElasticError, RuntimeError):
    """A sample store cannot be opened, or was called with invalid arguments."""


class StreamError(ElasticError, RuntimeError):
    """A stream cannot be learned from: a setting, a source, or the saved state is invalid."""


class StreamDataError(StreamError):
    """The data or the saved state of a stream cannot be used, and a restart will not help."""

    # EX_DATAERR of sysexits.h: a service manager does not restart a service that ends with it.
    exit_status = 65
