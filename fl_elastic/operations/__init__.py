"""For operators: a journal of rounds, metrics to scrape, and model export."""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late
from fl_elastic.operations.journal import Journal

if TYPE_CHECKING:
    from fl_elastic.operations.model_export import export_model

__all__ = ["Journal", "export_model"]

__getattr__ = loaded_late(__name__, {"export_model": "model_export"})
