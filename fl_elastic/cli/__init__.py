"""The command line: ``fl-elastic plan``, ``stream``, ``fleet``, and commands of installed packages."""

from fl_elastic.cli.main import main

__all__ = ["main"]
