"""Diagnose why a node or a server does not work, and say how to repair it."""
