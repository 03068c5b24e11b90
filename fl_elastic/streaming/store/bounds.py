"""How a store's capacity is divided among its file, the write-ahead log, and the log's index."""

from __future__ import annotations

import mmap
from typing import NamedTuple

__all__ = ["LEAST_CAPACITY", "Rows", "StoreBounds", "page_size_for"]

LEAST_CAPACITY = 128 * 1024
"""Bytes below which the log and its index would be most of it."""

_SHARE_OF_LOG = 4
# The index of the log is one block of so many bytes (or a page of the machine's memory) up to 4062 frames.
_INDEX_BYTES = 32 * 1024
_MOST_FRAMES = 4000
_LOG_HEADER, _FRAME_HEADER = 32, 24
# Pages that indices may need while they are rearranged.
_SPARE_PAGES = 12
# Pages that placing a row may touch besides its own: of the table, three indices and two counters, for it and for
# one or two that leave for it, and their splits.
_PAGES_BESIDE_ROW = 12
# And once for a transaction: the first page, the list of free ones, what a split reaches further up.
_PAGES_ONCE = 12
# What a row has besides its sample: number, label, draw, version, lengths.
_ROW_HEADER = 96


class Rows(NamedTuple):
    """How many rows are written, and the bytes of the largest."""

    many: int
    size: int


class StoreBounds:
    """Bytes that each file of a store may take; together never more than its capacity.

    >>> bounds = StoreBounds(2**20, page=1024)
    >>> bounds.log, bounds.pages, bounds.largest_row, bounds.rows_per_transaction(100)
    (253952, 744, 222263, 8)
    """

    def __init__(self, capacity_bytes: int, page: int) -> None:
        frame = page + _FRAME_HEADER
        index = max(_INDEX_BYTES, mmap.PAGESIZE)
        # Most goes to the file, and to the log not more than one block can index.
        self.log = min(
            (capacity_bytes - index) // _SHARE_OF_LOG, _LOG_HEADER + _MOST_FRAMES * frame
        )
        self.page, self.pages = page, (capacity_bytes - index - self.log) // page
        self._frames = (self.log - _LOG_HEADER) // frame
        most = self._frames - _PAGES_ONCE - _PAGES_BESIDE_ROW
        # Of the largest row that the log can take.
        self.largest_row = most * (self.page - 4) - _ROW_HEADER - 1

    def rows_per_transaction(self, row_bytes: int) -> int:
        """Return how many rows may be written together: half of the log, not to shorten it before each of them."""
        per_row = _PAGES_BESIDE_ROW + self._pages_of_row(row_bytes)
        return max((self._frames // 2 - _PAGES_ONCE) // per_row, 1)

    def log_of(self, rows: Rows) -> int:
        """Return what a transaction that writes these rows may add to the log, in bytes."""
        pages = _PAGES_ONCE + rows.many * (_PAGES_BESIDE_ROW + self._pages_of_row(rows.size))
        return pages * (self.page + _FRAME_HEADER)

    def rooms(self, used_pages: int, row_bytes: int) -> int:
        """Return how many more rows surely fit into a file with so many pages in use."""
        left = self.pages - used_pages - _SPARE_PAGES
        own = self._pages_of_row(row_bytes)
        # A small row may start a page in the table and in each of three indices.
        return max(left // (own + 4), int(left >= own + 1))

    def is_tight(self, used_pages: int, row_bytes: int) -> bool:
        """Whether indices may outgrow the file while one row takes the place of another."""
        return self.pages - used_pages < self._pages_of_row(row_bytes) + _SPARE_PAGES // 2

    def _pages_of_row(self, row_bytes: int) -> int:
        return (row_bytes + _ROW_HEADER) // (self.page - 4) + 1


def page_size_for(capacity_bytes: int) -> int:
    """Return the size of a new file's pages: small where a few of them would be all there is."""
    return 512 if capacity_bytes < 2**18 else 1024 if capacity_bytes < 2**23 else 4096
