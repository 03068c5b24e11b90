"""What a server can ask of a client: one file for each task, with its message, its handler and its collector."""
