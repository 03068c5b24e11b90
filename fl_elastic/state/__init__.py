"""State that a process must find again: files, archives, and one codec between archives and dataclasses."""
