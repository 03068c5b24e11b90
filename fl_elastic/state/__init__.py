"""Durable state: atomic files, archives, rows in SQLite, and one codec between archives and dataclasses."""
