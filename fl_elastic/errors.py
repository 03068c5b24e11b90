"""The one family of exceptions of fl_elastic.

Every message says what was wrong, which value was seen, and what to do about it. Each class also inherits from the
builtin exception that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Base class of every error that fl_elastic raises deliberately."""

    exit_status = 1
    """Exit status of a command that ends with this error."""


class LaboratoryMissing(ElasticError, RuntimeError):
    """A requested feature is part of fl-elastic-simulations, which is not installed."""


class ArchiveError(ElasticError, ValueError):
    """A state file is damaged, too long, or of another kind."""


class ArchiveVersionError(ArchiveError):
    """A state file is intact but of another version."""


class BudgetError(ElasticError, ValueError):
    """A budget is invalid, or no plan or step fits it."""


class ModelError(ElasticError, ValueError):
    """A model is unknown or cannot be built, traced, cut, exported or trained."""


class MissedCut(ModelError):
    """The model did not pass through its cut this time, because its code takes another path in some steps."""


class PlanError(ElasticError, ValueError):
    """A policy, mode, place or plan is invalid or does not fit the model."""


class ProfileError(ElasticError, ValueError):
    """A cost profile cannot be read or written, is invalid, or belongs to another model or device."""


class RegistryError(ElasticError, ValueError):
    """A plug-in's name is unknown, taken or malformed."""


class SettingError(ElasticError, ValueError):
    """A setting of a client or server is invalid, or incompatible with others or with Flower's strategy."""


class TrainingError(ElasticError, RuntimeError):
    """Training or evaluation cannot go on, because of data, loss, optimiser or settings."""


class UpdateError(ElasticError, ValueError):
    """An update, model, or other message does not fit the model, or its bytes are damaged."""


class DivergedError(TrainingError, UpdateError):
    """A loss or a trained tensor is no longer finite, here or, on a server, on a client that reports it."""


class StaleModelError(UpdateError):
    """A message of changed tensors does not fit the model held here; the full model is needed."""


class CheckpointError(ElasticError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the strategy or model."""


class ScenarioError(ElasticError, ValueError):
    """A scenario file has an invalid key or value."""


class DatasetError(ElasticError, RuntimeError):
    """A dataset is missing or damaged."""


class FleetError(ElasticError, RuntimeError):
    """A fleet's folder, keys, settings or processes are in a wrong state."""


class StoreError(ElasticError, RuntimeError):
    """A sample store cannot be opened, read or written, or was called with invalid arguments."""


class StreamError(ElasticError, RuntimeError):
    """A stream cannot be learned from: a setting, a source, or the saved state is invalid."""


class StreamDataError(StreamError):
    """The data or the saved state of a stream cannot be used, and a restart will not help."""

    # EX_DATAERR of sysexits.h, for which the shipped service unit is not restarted.
    exit_status = 65
