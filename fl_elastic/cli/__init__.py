"""The command line: ``fl-elastic plan``, ``simulate``, ``bench``."""

from fl_elastic.cli.main import main

__all__ = ["main"]
