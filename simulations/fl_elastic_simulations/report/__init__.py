"""What a simulation found out: a table for the terminal and one self-contained HTML page."""

from __future__ import annotations

from fl_elastic_simulations.report.page import write_page
from fl_elastic_simulations.report.tables import results_table

__all__ = ["results_table", "write_page"]
