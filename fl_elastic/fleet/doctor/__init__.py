"""Find out why a node or a server will not work, and say how to mend it."""
