"""What operators look at: a journal of rounds, metrics to scrape, models to take away."""

from fl_elastic.operations.journal import Journal, read_journal
from fl_elastic.operations.logs import log_to_file
from fl_elastic.operations.model_export import export_model

__all__ = ["Journal", "export_model", "log_to_file", "read_journal"]
