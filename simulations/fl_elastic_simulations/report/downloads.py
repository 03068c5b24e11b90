"""The numbers of a page as files that a reader takes from the page itself: no server is asked for them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fl_elastic_simulations.report.summary import Results

__all__ = ["Download", "downloads", "summary_json"]


@dataclass(frozen=True)
class Download:
    """A file inside a page: its name, what it holds, and its content as a ``data:`` link."""

    name: str
    told: str
    link: str


def downloads(summary: Mapping[str, object], results: Results) -> list[Download]:
    """Return the summary as JSON, and the curves as CSV where there are any; what is not known stays empty."""
    files = [
        _file(
            "summary.json", "every number of this page", "application/json", summary_json(summary)
        )
    ]
    points = [
        {"method": method.name, **point.model_dump()}
        for method in results.methods
        for point in method.history
    ]
    if points:
        told = "accuracy, seconds and bytes of each method, seed and round"
        text = pd.DataFrame(points).convert_dtypes().to_csv(index=False, lineterminator="\r\n")
        files.append(_file("curves.csv", told, "text/csv", text))
    return files


def summary_json(summary: Mapping[str, object]) -> str:
    """Return a summary as JSON; what is no finite number becomes null.

    >>> summary_json({"rounds": 3, "loss": float("nan")})
    '{"rounds": 3, "loss": null}'
    """
    return json.dumps(_plain(summary), default=str, allow_nan=False)


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
