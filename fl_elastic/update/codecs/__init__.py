"""Codecs for the numbers of a partial update: one class each, found by name."""
