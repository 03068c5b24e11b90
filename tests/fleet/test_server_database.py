"""The server's database, as releases of Flower come and go: each finds what it can open, nothing is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fleet_folders import make_fleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet import serve
from fl_elastic.fleet.private_files import mode_of
from fl_elastic.fleet.server_database import fit_to_release


def ran(database: Path, release: str) -> list[str]:
    """What a SuperLink does: migrate the schema, refuse a later one, add a row. Returns the rows."""
    minor = int(release.split(".")[1])
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA journal_mode = WAL")
        (schema,) = opened.execute("PRAGMA user_version").fetchone()
        if schema > minor:
            raise RuntimeError(f"a {release} SuperLink refuses schema {schema}")
        opened.execute(f"PRAGMA user_version = {minor}")
        opened.execute("CREATE TABLE IF NOT EXISTS keys(name TEXT)")
        opened.execute("INSERT INTO keys VALUES (?)", (release,))
        opened.commit()
        return [name for (name,) in opened.execute("SELECT name FROM keys")]


def started(database: Path, release: str) -> tuple[list[str], str]:
    said = fit_to_release(database, release)
    return ran(database, release), said


def test_a_release_is_rolled_back_and_forward_again(tmp_path: Path) -> None:
    database = tmp_path / "state.db"
    assert started(database, "1.41.0") == (["1.41.0"], "")
    assert started(database, "1.41.3") == (["1.41.0", "1.41.3"], "")
    rows, said = started(database, "1.42.0")
    assert rows == ["1.41.0", "1.41.3", "1.42.0"] and "copied to state.db.flower-1.41" in said
    # Without the copy it would refuse; what was registered since is not there.
    rows, said = started(database, "1.41.0")
    assert rows == ["1.41.0", "1.41.3", "1.41.0"] and "fl-elastic fleet register" in said
    # What came while it was back is carried on.
    rows, said = started(database, "1.42.1")
    assert rows == ["1.41.0", "1.41.3", "1.41.0", "1.42.1"]
    assert ran(tmp_path / "state.db.flower-1.41", "1.41.0")[:3] == rows[:3]


def test_going_back_to_where_nothing_was_kept_begins_anew_and_loses_nothing(tmp_path: Path) -> None:
    database = tmp_path / "state.db"
    started(database, "1.42.0")
    rows, said = started(database, "1.41.0")
    assert rows == ["1.41.0"] and "begins a new one" in said and "state.db.flower-1.42" in said
    assert ran(tmp_path / "state.db.flower-1.42", "1.42.0") == ["1.42.0", "1.42.0"]
    # Numbers, not letters: 1.9 is before 1.10.
    other = tmp_path / "other.db"
    started(other, "1.9.0")
    assert "copied" in started(other, "1.10.0")[1]


def test_a_database_of_before_there_were_marks_is_copied_too(tmp_path: Path) -> None:
    database = tmp_path / "state.db"
    ran(database, "1.41.0")
    assert "copied to state.db.before" in fit_to_release(database, "1.42.0")
    ran(database, "1.42.0")
    assert ran(tmp_path / "state.db.before", "1.41.0") == ["1.41.0"] * 2
    assert mode_of(tmp_path / "state.db.before") == 0o600
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*"))


def test_a_copy_that_is_not_taken_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "state.db"
    started(database, "1.41.0")
    database.write_bytes(b"no database at all" * 100)
    with pytest.raises(FleetError, match="cannot be kept"):
        fit_to_release(database, "1.42.0")
    # Nothing is marked, so the next start tries again.
    assert (tmp_path / "state.db.release").read_text() == "1.41"


def test_a_server_is_started_on_a_database_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    launch = serve.server_launch(folder, {"PATH": ""}, "127.0.0.1", 9)
    assert launch.database == folder.root.resolve() / "server" / "state.db"
    done: list[object] = []
    monkeypatch.setattr(serve, "check_port_is_free", lambda *_: done.append("free"))
    monkeypatch.setattr(serve, "fit_to_release", lambda *given: done.append(given) or "")

    def run(*_: object) -> None:
        # What it writes is its owner's alone.
        (tmp_path / "written").write_text("")
        done.append("run")

    monkeypatch.setattr(serve.os, "execve", run)
    monkeypatch.setattr(serve.os, "chdir", lambda _: None)
    serve.become(launch)
    # Not while another one runs.
    assert done == ["free", (launch.database, serve.version("flwr")), "run"]
    assert mode_of(tmp_path / "written") == 0o600
