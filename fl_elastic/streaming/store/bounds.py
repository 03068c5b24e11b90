"""Division of a store's capacity between its file, the write-ahead log, and the log's index."""

from __future__ import annotations

import mmap
from typing import NamedTuple

LEAST_CAPACITY = 128 * 1024
"""Smallest capacity in bytes; of a smaller one, log and index would take most."""

_SHARE_OF_LOG = 4
# The log's index is one block of this many bytes (or one memory page) for up to 4062 frames.
_INDEX_BYTES = 32 * 1024
_MOST_FRAMES = 4000
_LOG_HEADER, _FRAME_HEADER = 32, 24
# Pages that the indices may need while they are rearranged.
_SPARE_PAGES = 12
# Pages that inserting a row may change besides its own: of the table, three indices and two counters, with their
# splits, for the row itself and for one or two rows that are deleted for it.
_PAGES_BESIDE_ROW = 12
# Further pages per transaction: the first page, the free list, and splits higher up in the trees.
_PAGES_ONCE = 12
# Bytes of a row besides its sample: number, label, draw, version, lengths.
_ROW_HEADER = 96


class RowsToWrite(NamedTuple):
    """Number of rows to write, and the bytes of the largest one."""

    many: int
    size: int


class StoreBounds:
    """Most bytes of each file of a store; together they never exceed its capacity.

    >>> bounds = StoreBounds(2**20, page=1024)
    >>> bounds.log, bounds.pages, bounds.largest_row, bounds.rows_per_transaction(100)
    (253952, 744, 222263, 8)
    """

    def __init__(self, capacity_bytes: int, page: int) -> None:
        frame = page + _FRAME_HEADER
        index = max(_INDEX_BYTES, mmap.PAGESIZE)
        # The log gets a quarter at most, and no more than one block can index; the file gets the rest.
        self.log = min(
            (capacity_bytes - index) // _SHARE_OF_LOG, _LOG_HEADER + _MOST_FRAMES * frame
        )
        self.page, self.pages = page, (capacity_bytes - index - self.log) // page
        self._frames = (self.log - _LOG_HEADER) // frame
        most = self._frames - _PAGES_ONCE - _PAGES_BESIDE_ROW
        # Bytes of the largest row that fits into the log.
        self.largest_row = most * (self.page - 4) - _ROW_HEADER - 1

    def rows_per_transaction(self, row_bytes: int) -> int:
        """Return how many rows to write together: up to half of the log, so that it is not emptied each time."""
        per_row = _PAGES_BESIDE_ROW + self._pages_of_row(row_bytes)
        return max((self._frames // 2 - _PAGES_ONCE) // per_row, 1)

    def log_of(self, rows: RowsToWrite) -> int:
        """Return the most bytes that a transaction with these rows adds to the log."""
        pages = _PAGES_ONCE + rows.many * (_PAGES_BESIDE_ROW + self._pages_of_row(rows.size))
        return pages * (self.page + _FRAME_HEADER)

    def rooms(self, used_pages: int, row_bytes: int) -> int:
        """Return how many more rows are certain to fit into a file with that many pages in use."""
        left = self.pages - used_pages - _SPARE_PAGES
        own = self._pages_of_row(row_bytes)
        # Even a small row may start a page in the table and in each of three indices.
        return max(left // (own + 4), int(left >= own + 1))

    def is_tight(self, used_pages: int, row_bytes: int) -> bool:
        """Return whether the indices may outgrow the file while one row replaces another."""
        return self.pages - used_pages < self._pages_of_row(row_bytes) + _SPARE_PAGES // 2

    def _pages_of_row(self, row_bytes: int) -> int:
        return (row_bytes + _ROW_HEADER) // (self.page - 4) + 1


def page_size_for(capacity_bytes: int) -> int:
    """Return the page size of a new file: small if the file can only have few pages."""
    return 512 if capacity_bytes < 2**18 else 1024 if capacity_bytes < 2**23 else 4096
