"""The numbers of a page as files that a reader takes from the page itself: no server is asked for them."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from fl_elastic_simulations.report.summary import Point, Results

__all__ = ["Download", "curves_csv", "downloads", "summary_json"]


@dataclass(frozen=True)
class Download:
    """A file inside a page: its name, what it holds, and its content as a ``data:`` link."""

    name: str
    told: str
    link: str


def downloads(summary: Mapping[str, object], results: Results) -> list[Download]:
    """Return the summary as JSON, and the curves as CSV where there are any."""
    files = [
        _file(
            "summary.json", "every number of this page", "application/json", summary_json(summary)
        )
    ]
    if any(method.history for method in results.methods):
        told = "accuracy, seconds and bytes of each method, seed and round"
        files.append(_file("curves.csv", told, "text/csv", curves_csv(results)))
    return files


def summary_json(summary: Mapping[str, object]) -> str:
    """Return a summary as JSON; what is no finite number becomes null.

    >>> summary_json({"rounds": 3, "loss": float("nan")})
    '{"rounds": 3, "loss": null}'
    """
    return json.dumps(_plain(summary), default=str, allow_nan=False)


def curves_csv(results: Results) -> str:
    """Return a line per method, seed and round that was tested; a value that is not known stays empty."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["method", *(field.name for field in fields(Point))])
    for method in results.methods:
        lines.writerows([method.name, *astuple(point)] for point in method.history)
    return text.getvalue()


def _file(name: str, told: str, kind: str, text: str) -> Download:
    # A lone surrogate in a name spoils no file.
    packed = base64.b64encode(text.encode(errors="replace")).decode()
    return Download(name, told, f"data:{kind};charset=utf-8;base64,{packed}")


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
