"""Deleting samples from a store's file, so many at a time that the log keeps to its bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fl_elastic.errors import StoreError
from fl_elastic.streaming.class_counts import ClassCounts
from fl_elastic.streaming.database import Database

__all__ = ["Condition", "delete_some"]


@dataclass(frozen=True)
class Condition:
    """Which samples are meant.

    Parameters
    ----------
    text : str
        What stands after WHERE.
    values : tuple
        Of its question marks.
    """

    text: str
    values: tuple[object, ...]

    @classmethod
    def of(
        cls,
        ids: Iterable[int] | None,
        label: int | None,
        before: float | None,
        other_than_version: str | None,
    ) -> Condition:
        """Return the condition that all that is given holds; StoreError if nothing is.

        >>> Condition.of(None, 3, 12.5, None)
        Condition(text='y = ? AND t < ?', values=(3, 12.5))
        """
        given: list[tuple[str, object]] = [
            ("y = ?", label), ("t < ?", before), ("version <> ?", other_than_version),
        ]  # fmt: skip
        clauses = [clause for clause, value in given if value is not None]
        values = tuple(value for _, value in given if value is not None)
        if ids is not None:
            # Whole numbers, so that the text of the query is safe.
            clauses.append(f"id IN ({','.join(str(int(each)) for each in ids)})")
        if not clauses:
            raise StoreError("say what to delete: ids, a label, an age or a version")
        return cls(" AND ".join(clauses), values)


def delete_some(database: Database, condition: Condition, row_bytes: int) -> tuple[int, bool]:
    """Delete as many of the samples as the log takes at once.

    Parameters
    ----------
    database : Database
        The file.
    condition : Condition
        Which.
    row_bytes : int
        What one of them takes.

    Returns
    -------
    tuple of int and bool
        How many, and whether there may be more.
    """
    many = max(database.bounds.rows_per_transaction(row_bytes), 1)
    with database.writing(many, row_bytes) as connection:
        found = connection.execute(
            f"SELECT slot, y FROM samples WHERE {condition.text} LIMIT ?",
            (*condition.values, many),
        ).fetchall()
        if not found:
            return 0, False
        counts = ClassCounts(connection)
        connection.executemany("DELETE FROM samples WHERE slot = ?", [(row[0],) for row in found])
        for _, label in found:
            counts.add(int(label), -1)
        counts.settle()
    return len(found), len(found) == many
