"""Fixed schemes of channels and biases, as published for training under 256 KB, and fitted to a budget."""

from __future__ import annotations

from fl_elastic.policies.sparse_update.policy import SparseUpdatePolicy

__all__ = ["SparseUpdatePolicy"]
