"""For operators: a journal of rounds, and metrics to scrape."""

from fl_elastic.monitoring.journal import Journal

__all__ = ["Journal"]
