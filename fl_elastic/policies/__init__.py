"""Ways to choose what is trained, a file or folder each, imported when a policy is asked for by name."""
