"""How a stream went, as one page that needs neither script nor network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fl_elastic.storage import write_atomically
from fl_elastic_simulations.report.drawing import areas, cells, legend, lines
from fl_elastic_simulations.report.formats import bytes_text
from fl_elastic_simulations.report.static_page import static_page

__all__ = ["stream_sections", "write_stream_page"]

_UNLABELLED = "-1"
_MOST_GROUPS = 60


def write_stream_page(summary: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a summary that `fl_elastic.streaming.summary.stream_summary` made."""
    refused = sum(summary["refused"].values())
    latest = summary["prequential_accuracy"]
    facts = [
        f"{summary['observed']} samples, {summary['labelled']} with a label, {refused} refused",
        "no label yet" if latest is None else f"accuracy of late {100 * latest:.1f} %",
        f"{summary['drifts']} drifts",
        f"{summary['adaptations']} adaptations, {summary['rolled_back']} of them undone",
        f"a store of {bytes_text(summary['store_bytes'])}",
    ]
    intro = f"<p>{escape('; '.join(facts))}.</p>"
    document = static_page("A stream", intro, stream_sections(summary), summary["environment"])
    return write_atomically(path, document.encode())


def stream_sections(summary: Mapping[str, Any]) -> list[str]:
    """Return the drawings of a summary: accuracy with drifts, what was trained when, the store by class."""
    points = summary["points"]
    if not points:
        return ["<section><p>No label has come yet: there is nothing to draw.</p></section>"]
    end = float(points[-1]["labelled"])
    accuracy = {"accuracy": [(point["labelled"], point["accuracy"]) for point in points]}
    made = [_section(
        "Accuracy along the stream",
        "Of predictions made before anything was learned of the sample. Dashed: drifts that were noticed.",
        lines(accuracy, end, marks=summary["drift_marks"], label="accuracy along the stream"),
    )]  # fmt: skip
    if summary["groups"]:
        made.append(_section(
            "What was trained when",
            "A row for each part of the model that was ever trained, input first; grey: undone by the guard.",
            _trained(summary, end),
        ))  # fmt: skip
    labels = sorted({label for point in points for label in point["stored"]}, key=int)
    names = {label: "no label" if label == _UNLABELLED else f"class {label}" for label in labels}
    stored = {
        names[label]: [(point["labelled"], float(point["stored"].get(label, 0))) for point in points]
        for label in labels
    }  # fmt: skip
    made.append(_section(
        "The store by class", "Samples in the store.",
        areas(stored, end, label="samples in the store by class") + legend(list(stored)),
    ))  # fmt: skip
    return made


def _trained(summary: Mapping[str, Any], end: float) -> str:
    groups = summary["groups"]
    # A row for each of a hundred parts would be lines only: neighbours share one.
    share = -(-len(groups) // _MOST_GROUPS)
    columns = [
        (float(each["at"]), sorted({row // share for row in each["trained"]}), bool(each["undone"]))
        for each in summary["adapted"]
    ]
    return cells(groups[::share], columns, end, label="what was trained when")


def _section(title: str, guide: str, drawing: str) -> str:
    return (
        f'<section><h2>{escape(title)}</h2><p class="guide">{escape(guide)}</p>{drawing}</section>'
    )
