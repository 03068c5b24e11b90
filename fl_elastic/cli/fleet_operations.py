"""``fl-elastic fleet exporter`` and ``fleet export``: metrics to scrape, and the trained model."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from fl_elastic.cli.fleet_output import say
from fl_elastic.laboratory import from_laboratory

__all__ = ["export", "exporter"]

_JOURNALS = ("rounds.jsonl", "metrics.jsonl")


def exporter(
    directory: Annotated[
        Path, typer.Option(help="Folder of the journal: the server's results, or a node's state.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any.")] = 9464,
    address: Annotated[
        str, typer.Option(help="Address to listen on; there is no password.")
    ] = "127.0.0.1",
) -> None:
    """Serve the newest round of a server or node as Prometheus metrics, until it is stopped."""
    from fl_elastic.operations.exporter import serve_metrics

    found = [directory / name for name in _JOURNALS if (directory / name).exists()]
    # Neither is there before the first round; a node's folder is told by what else is in it.
    default = directory / _JOURNALS[0 if directory.name == "results" else 1]
    server = serve_metrics(found[0] if found else default, address=address, port=port)
    say(f"serving http://{address}:{server.server_port}/metrics")
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    done.wait()
    server.shutdown()


def export(
    results: Annotated[Path, typer.Argument(help="Folder of the run's results.")],
    output: Annotated[Path, typer.Argument(help="File to write: *.safetensors or *.onnx.")],
    scenario: Annotated[
        Path | None, typer.Option(help="Scenario file, if the results do not hold it.")
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of datasets; FL_ELASTIC_DATA_ROOT does the same.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the model of a run's newest checkpoint to a file that other programs read."""
    done = from_laboratory("export_run")(results, output, scenario=scenario, data_root=data_root)
    if as_json:
        typer.echo(json.dumps(done))
    else:
        say(f"{done['file']}: round {done['round']}, {done['bytes']:,} bytes")
