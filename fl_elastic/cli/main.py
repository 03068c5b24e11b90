"""Entry point: the commands, and errors as one clear line."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import Console

from fl_elastic import __version__
from fl_elastic.cli.fleet import fleet
from fl_elastic.cli.plan import plan
from fl_elastic.cli.stream import stream_app
from fl_elastic.errors import ElasticError
from fl_elastic.laboratory import COMMANDS as LABORATORY
from fl_elastic.laboratory import missing

_INTERRUPTED = 130

app = typer.Typer(
    name="fl-elastic",
    help="Elastic federated training: each device trains what it can afford.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fl-elastic {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Elastic federated training: each device trains what it can afford."""
    del version


def _add_installed() -> None:
    """Add the commands of installed packages; a missing command of the laboratory names the package to install."""
    found = {entry.name: entry for entry in entry_points(group="fl_elastic.commands")}
    for name, entry in sorted(found.items()):
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            # A broken package must not disable the other commands.
            problem = ElasticError(f"fl-elastic {name} ({entry.value}) cannot be loaded: {error}")
            _add_refusing(name, "Cannot be loaded.", problem)
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name in sorted(set(LABORATORY) - set(found)):
        _add_refusing(name, LABORATORY[name], missing(f"fl-elastic {name}"))


def _add_refusing(name: str, about: str, error: ElasticError) -> None:
    @app.command(name, help=about, context_settings={"ignore_unknown_options": True})
    def refuse(rest: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        del rest
        raise error


app.command()(plan)
app.add_typer(stream_app, name="stream")
app.add_typer(fleet, name="fleet")
_add_installed()


def main() -> None:
    """Run the command line; an error of fl_elastic or the disk becomes one line and an exit status."""
    # Disable the telemetry of libraries, unless the user has set it, and a warning of one of them.
    for switch in (
        "FLWR_TELEMETRY_ENABLED",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    ):
        os.environ.setdefault(switch, "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    # Flower's logger has its own handler.
    logging.getLogger("flwr").propagate = False
    try:
        app()
    except (ElasticError, OSError) as error:
        # An OSError here means that the disk is full or that a folder was removed.
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(error.exit_status if isinstance(error, ElasticError) else 1)
    except (KeyboardInterrupt, SystemExit) as end:
        # typer reports Ctrl-C by this exit status.
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:
            raise
        Console(stderr=True).print("interrupted; finished parts are kept", highlight=False)
        sys.exit(_INTERRUPTED)
