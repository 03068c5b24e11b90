"""How a store's bytes are shared by its file, the log beside it, and the log's index."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

__all__ = ["LEAST_CAPACITY", "StoreBounds", "page_size_for"]

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
# What a row has besides sample and scores: number, label, draw, time, version, lengths.
_ROW_HEADER = 96


@dataclass(frozen=True)
class StoreBounds:
    """Bytes that each file of a store may take; together never more than its capacity.

    Parameters
    ----------
    page : int
        Bytes of a page of the file.
    index, log, file : int
        Bytes of ``-shm``, of ``-wal``, and of the file itself.

    Examples
    --------
    >>> bounds = StoreBounds.of(2**20, page=1024)
    >>> bounds.index + bounds.log + bounds.file <= 2**20
    True
    >>> bounds.rows_per_transaction(100), bounds.rows_per_transaction(2**20)
    (8, 0)
    """

    page: int
    index: int
    log: int
    file: int

    @classmethod
    def of(cls, capacity_bytes: int, page: int) -> StoreBounds:
        """Share a capacity out: most to the file, and to the log not more than one block can index."""
        index = max(_INDEX_BYTES, mmap.PAGESIZE)
        most = _LOG_HEADER + _MOST_FRAMES * (page + _FRAME_HEADER)
        log = min((capacity_bytes - index) // _SHARE_OF_LOG, most)
        return cls(page, index, log, (capacity_bytes - index - log) // page * page)

    @property
    def pages(self) -> int:
        """Pages that the file may have."""
        return self.file // self.page

    def pages_of_row(self, row_bytes: int) -> int:
        """Return how many pages a sample of so many bytes may take."""
        return (row_bytes + _ROW_HEADER) // (self.page - 4) + 1

    def log_of(self, rows: int, row_bytes: int) -> int:
        """Return what a transaction that writes so many rows of this size may add to the log, in bytes."""
        pages = _PAGES_ONCE + rows * (_PAGES_BESIDE_ROW + self.pages_of_row(row_bytes))
        return pages * (self.page + _FRAME_HEADER)

    def rows_per_transaction(self, row_bytes: int) -> int:
        """Return how many rows of this size may be written together; 0 if not even one fits into the log.

        Half of the log if it can be, so that it need not be shortened before each of them.
        """
        frames = (self.log - _LOG_HEADER) // (self.page + _FRAME_HEADER)
        per_row = _PAGES_BESIDE_ROW + self.pages_of_row(row_bytes)
        fitting = (frames - _PAGES_ONCE) // per_row
        return min(max((frames // 2 - _PAGES_ONCE) // per_row, 1), max(fitting, 0))

    def rooms(self, used_pages: int, row_bytes: int) -> int:
        """Return how many more rows surely fit into a file with so many pages in use."""
        left = self.pages - used_pages - _SPARE_PAGES
        own = self.pages_of_row(row_bytes)
        # A small row may start a page in the table and in each of three indices.
        return max(left // (own + 4), int(left >= own + 1))

    def is_tight(self, used_pages: int, row_bytes: int) -> bool:
        """Whether indices may outgrow the file while one row takes the place of another."""
        return self.pages - used_pages < self.pages_of_row(row_bytes) + _SPARE_PAGES // 2


def page_size_for(capacity_bytes: int) -> int:
    """Return the size of a new file's pages: small where a few of them would be all there is."""
    return 512 if capacity_bytes < 2**18 else 1024 if capacity_bytes < 2**23 else 4096
