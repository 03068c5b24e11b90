"""Monitoring for operators of a federation: a journal of rounds in a file, and Prometheus metrics from it."""

from fl_elastic.monitoring.journal import Journal

__all__ = ["Journal"]
