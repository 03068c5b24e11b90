"""A journal of rounds in a file, and Prometheus metrics from it, for operators of a federation."""

from fl_elastic.monitoring.journal import Journal

__all__ = ["Journal"]
