"""What a process must find again: whole files, archives, and one codec between them and dataclasses."""
