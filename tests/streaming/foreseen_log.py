"""What transactions of a store say beforehand that they will write into the log."""

from __future__ import annotations

import pytest

from fl_elastic.streaming.store.sqlite import Database


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every transaction from now on adds its bytes."""
    foreseen: list[int] = []
    begin = Database._begin

    def noted(self: Database, log_bytes: int) -> None:
        begin(self, log_bytes)
        foreseen.append(log_bytes)

    monkeypatch.setattr(Database, "_begin", noted)
    return foreseen
