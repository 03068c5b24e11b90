"""Reports of a simulation or a stream, as a page and as tables."""
