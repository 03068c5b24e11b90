"""The Flower app of the repository and its scenarios."""
