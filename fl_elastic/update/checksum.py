"""The checksum of packed messages: sums of words along the rows and columns of a table, and a digest of them.

Summing whole words takes a quarter of the time of a CRC-32, and promises more: damage to up to three words, or
anywhere within the length of a row, changes a sum for certain, and different sums have different digests but for
one chance in 2^128. It guards against accidents, not against people: TLS and node keys do that.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

__all__ = ["CHECKSUM_BYTES", "ROW_BYTES", "checksum"]

CHECKSUM_BYTES = 16
_WORD = np.dtype("<u8")
# Odd, so that writing one constant over another in a whole row never leaves the row's sum as it was.
_ROW = 1023
ROW_BYTES = _ROW * _WORD.itemsize
# Rows that stay in the processor's cache while they are summed both ways.
_ROWS_AT_ONCE = 32


def checksum(head: bytes, numbers: bytes | memoryview) -> bytes:
    """Return the checksum of a message.

    Parameters
    ----------
    head : bytes
        What is digested as it is.
    numbers : bytes-like
        What is laid out in rows of `ROW_BYTES`. The digest takes the sums of the 64-bit words of each row and of
        each column, modulo 2^64, and the bytes after the last whole row as they are.

    Examples
    --------
    >>> rows = bytes(range(256)) * 64
    >>> checksum(b"", rows) == checksum(b"", rows[8:16] + rows[:8] + rows[16:])
    False
    """
    view = memoryview(numbers).cast("B")
    digest = blake2b(head, digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<Q", len(view)))
    whole = len(view) // ROW_BYTES
    if whole:
        words = np.frombuffer(view, _WORD, count=whole * _ROW).reshape(whole, _ROW)
        rows, columns = np.empty(whole, _WORD), np.zeros(_ROW, _WORD)
        for start in range(0, whole, _ROWS_AT_ONCE):
            some = words[start : start + _ROWS_AT_ONCE]
            np.add.reduce(some, axis=1, out=rows[start : start + _ROWS_AT_ONCE])
            columns += np.add.reduce(some, axis=0)
        digest.update(rows.tobytes())
        digest.update(columns.tobytes())
    digest.update(view[whole * ROW_BYTES :])
    return digest.digest()
