"""``fl-elastic stream`` as a process of its own: killed, its files damaged, its disk full, its port taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call as call_here
from processes import start
from real_processes import free_port, wait_until
from small_disk import small_disk

from fl_elastic.state.codec import to_archive
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.learner_state import load_state

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

MODEL = """
from torch import nn


def tiny():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
ROWS = 400


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty_models.py").write_text(MODEL)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # In this process the module is found by its folder alone.
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["a,b,c,d,label"]
    lines += [",".join(f"{v:.4f}" for v in x) + f",{y}" for x, y in samples(ROWS)]
    lines[30] = "1,2,nan,4,0"
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    yield tmp_path
    sys.modules.pop("faulty_models", None)


def samples(count: int) -> list[tuple[Any, int]]:
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=count)
    x = generator.normal(size=(count, 4)) + 3 * labels[:, None]
    return list(zip(x, labels.tolist(), strict=True))


def arguments(place: Path, source: str, *more: object) -> list[object]:
    return [
        "stream", "--source", source, "--model", "faulty_models:tiny", "--input", "4",
        "--state-dir", place / "state", "--policy", "full", "--detector", "none", "--every", "40",
        "--steps", "4", "--json", *more,
    ]  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Status and words of a process; none is waited for longer than so."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def run(place: Path, *more: object) -> tuple[dict[str, Any], str]:
    status, out, err = ended(start(place, *arguments(place, f"csv:{place}/table.csv", *more)))
    assert status == 0, err
    return json.loads(out), err


def test_damaged_files_are_put_aside_and_said(place: Path) -> None:
    first, _ = run(place)
    folder = place / "state"
    for name in ("samples.db", "learner.state"):
        data = bytearray((folder / name).read_bytes())
        data[: len(data) // 2] = os.urandom(len(data) // 2)
        (folder / name).write_bytes(bytes(data))
    second, err = run(place)
    assert "put aside as samples.db.damaged-1" in err
    assert "put aside as learner.state.damaged-1" in err and "Traceback" not in err
    assert second["observed"] == first["observed"] == ROWS - 1
    assert sum(second["stored"].values()) > 300


def test_a_second_service_on_the_same_folder_is_kept_out_until_the_first_dies(place: Path) -> None:
    state = place / "state" / "learner.state"
    service = start(place, *arguments(place, f"csv:{place}/table.csv", "--follow"))
    try:
        assert wait_until(state.exists, 60)
        status, out, err = ended(start(place, *arguments(place, f"csv:{place}/table.csv")))
        assert status == 1 and out == "" and err.startswith("error: another process learns in")
        assert len(err.splitlines()) == 1 and str(place / "state") in err
    finally:
        os.kill(service.pid, signal.SIGKILL)
        service.communicate(timeout=60)
    said, _ = run(place)
    assert said["observed"] == ROWS - 1


def fill(disk: Path) -> Path:
    """Leave no room at all."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (2**16, 2**12, 1):
            try:
                while filler.write(b"-" * size):
                    continue
            except OSError:
                continue
    return disk / "filler"


class Client:
    """One who sends samples to a service and reads what comes of them."""

    def __init__(self, port: int, service: subprocess.Popen[str]) -> None:
        end = time.monotonic() + 90
        while True:
            try:
                self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
                break
            except OSError:
                assert service.poll() is None and time.monotonic() < end, "it does not listen"
                time.sleep(0.1)
        self._answers = self._connection.makefile()

    def send(self, rows: list[tuple[Any, int]], labelled: bool = True) -> list[dict[str, Any]]:
        answers = []
        for x, y in rows:
            line = {"x": x.tolist(), **({"y": y} if labelled else {})}
            self._connection.sendall(json.dumps(line).encode() + b"\n")
            answers.append(json.loads(self._answers.readline()))
        return answers


def test_a_full_disk_costs_what_cannot_be_kept_and_the_service_goes_on(place: Path) -> None:
    disk, port = place / "disk", free_port()
    with small_disk(disk, "1m"):
        where = ["--state-dir", disk / "state", "--capacity", 2**19]
        service = start(place, *arguments(place, f"socket:127.0.0.1:{port}", *where))
        try:
            client = Client(port, service)
            assert not any(each["refused"] for each in client.send(samples(100)))
            state = load_state(disk / "state" / "learner.state")
            assert state is not None and state.progress.observed == 80
            filler = fill(disk)
            answers = client.send(samples(2500), labelled=False) + client.send(samples(100))
            # Every one is predicted, those that cannot be kept have no id.
            assert not any(each["refused"] or each["prediction"] is None for each in answers)
            assert answers[2499]["sample_id"] is None
            again = load_state(disk / "state" / "learner.state")
            assert again is not None and to_archive(again).facts == to_archive(state).facts
            filler.unlink()
            answers = client.send(samples(100))
            assert answers[0]["sample_id"] is not None
        finally:
            service.send_signal(signal.SIGTERM)
            status, out, err = ended(service)
        said = json.loads(out)
        assert status == 0 and said["observed"] == 2800 and "Traceback" not in err
        assert "could not be written" in err and "could not be saved" in err
        assert len(err.splitlines()) < 100
        state = load_state(disk / "state" / "learner.state")
        assert state is not None and state.progress.observed == 2800
        assert state.progress.saves_failed > 0
        with SampleStore(disk / "state" / "samples.db", 2**19) as store:
            assert len(store) == sum(store.classes.values()) > 100


def test_a_port_that_is_taken_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        source = f"socket:127.0.0.1:{taken.getsockname()[1]}"
        told = call_here(monkeypatch, capsys, *arguments(place, source))
    assert told.is_one_line_of_error() and "cannot listen on 127.0.0.1" in told.err


def wide_table(place: Path, rows: int) -> Path:
    """A table of 800 numbers a row, for a model that takes them."""
    (place / "faulty_models.py").write_text(
        MODEL + "\n\ndef wide():\n    return nn.Sequential(nn.Linear(800, 2))\n"
    )
    x = np.random.default_rng(0).normal(size=(rows, 800)).round(2)
    path = place / "wide.csv"
    header = ",".join([*(f"x{i}" for i in range(800)), "label"])
    path.write_text(
        "\n".join([header, *(",".join(map(str, [*each, int(each[0] > 0)])) for each in x)]) + "\n"
    )
    return path


def test_on_a_small_disk_the_store_is_as_large_as_fits_and_everything_is_saved(
    place: Path,
) -> None:
    disk, table = place / "disk", wide_table(place, 4000)
    with small_disk(disk, "8m"):
        given = arguments(place, f"csv:{table}", "--state-dir", disk / "state")
        given += ["--model", "faulty_models:wide", "--input", 800]
        status, out, err = ended(start(place, *given), 300)
        assert status == 0, err
        said = json.loads(out)
        assert said["observed"] == 4000 and 500 < sum(said["stored"].values()) < 2000
        assert "could not be" not in err
        state = load_state(disk / "state" / "learner.state")
        assert state is not None and state.progress.observed == 4000
        assert state.progress.saves_failed == 0
        # It is opened again with the same size.
        status, out, err = ended(start(place, *given))
        assert status == 0 and json.loads(out)["observed"] == 4000, err
        # More than fits is refused before anything is read.
        told = ended(start(place, *given, "--capacity", 2**23))
        assert told[0] == 1 and told[2].startswith("error: the disk of") and "--capacity" in told[2]
        assert len(told[2].splitlines()) == 1


def test_a_state_that_cannot_be_saved_at_the_end_is_no_success(place: Path) -> None:
    disk = place / "disk"
    with small_disk(disk, "2m"):
        where = ["--state-dir", disk / "state", "--capacity", 2**19, "--follow"]
        service = start(place, *arguments(place, f"csv:{place}/table.csv", *where))
        try:
            state = disk / "state" / "learner.state"
            assert wait_until(state.exists, 60)
            filler = fill(disk)
            with open(place / "table.csv", "a") as table:
                table.writelines(f"1,2,3,4,{i % 2}\n" for i in range(3000))
            log = disk / "state" / "events.log"
            assert wait_until(lambda: not log.exists() or log.stat().st_size > 0, 60)
            service.send_signal(signal.SIGTERM)
        finally:
            status, out, err = ended(service)
        assert status == 1 and out == "" and "Traceback" not in err
        assert err.splitlines()[-1].startswith("error: the state could not be saved to")
        filler.unlink()
        status, out, err = ended(
            start(place, *arguments(place, f"csv:{place}/table.csv", *where[:-1]))
        )
        assert status == 0, err
        said = json.loads(out)
        assert said["observed"] == ROWS - 1 + 3000 and sum(said["refused"].values()) == 1
