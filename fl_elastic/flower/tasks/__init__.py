"""Tasks that a server can give a client: one file for each task, with its message and its handler."""
