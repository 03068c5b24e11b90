"""Measurements behind the claims: each is a command, resumable, and writes a small table."""
