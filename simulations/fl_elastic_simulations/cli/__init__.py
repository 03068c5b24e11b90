"""Commands that this distribution adds to ``fl-elastic``."""
