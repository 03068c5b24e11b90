"""A page that needs neither script nor network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fl_elastic_simulations.report.drawing import DRAWING_STYLE
from fl_elastic_simulations.report.style import STYLE

__all__ = ["static_page"]


def static_page(title: str, intro: str, sections: Sequence[str], about: Mapping[str, Any]) -> str:
    """Return a whole document.

    Parameters
    ----------
    title : str
        Of the document.
    intro : str
        HTML under the title.
    sections : sequence of str
        HTML of the rest.
    about : mapping
        What it was measured with, for the foot.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{DRAWING_STYLE}</style></head><body><main>",
            f"<header><h1>{escape(title)}</h1>{intro}</header>",
            *sections,
            f"</main><footer><p>{escape(', '.join(f'{k} {v}' for k, v in about.items()))}</p></footer>",
            "</body></html>\n",
        ]
    )
