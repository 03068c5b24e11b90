"""``fl-elastic stream``: a table learned from, twice; a service that is stopped; how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import numpy as np
import pytest
import typer
from slow_ones import slow_unless
from typer.testing import CliRunner

from fl_elastic.cli import stream as stream_module
from fl_elastic.cli.stream import _gathered, stream, stream_app
from fl_elastic.errors import ElasticError, StreamDataError
from fl_elastic.streaming.disk_room import fitting_capacity
from fl_elastic.streaming.sources import SourceReading

MODELS = """
from torch import nn


def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def vague():
    return nn.Identity()


def words():
    return nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))


def other():
    return nn.Sequential(nn.Linear(5, 2))
"""
APP = typer.Typer()
APP.command()(stream)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stream_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=300)
    x = generator.normal(size=(300, 4)) + 3 * labels[:, None]
    rows = [",".join(f"{v:.4f}" for v in each) + f",{y}" for each, y in zip(x, labels, strict=True)]
    rows[7] = "a,b,c,d,0"
    (tmp_path / "table.csv").write_text("a,b,c,d,label\n" + "\n".join(rows) + "\n")
    yield tmp_path
    sys.modules.pop("stream_models", None)


def arguments(place: Path, *more: str) -> list[str]:
    return [
        "--source", f"csv:{place}/table.csv", "--model", "stream_models:tiny", "--input", "2,2",
        "--state-dir", str(place / "state"), "--policy", "full", "--detector", "none",
        "--every", "50", "--learning-rate", "0.02", *more,
    ]  # fmt: skip


def call(*given: str) -> Any:
    ended = CliRunner().invoke(APP, list(given), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout) if "--json" in given else ended.stdout


def test_a_table_in_two_goes(place: Path) -> None:
    first = call(*arguments(place, "--json", "--limit", "150"))
    assert first["observed"] == 149 and sum(first["refused"].values()) == 1
    assert first["adaptations"] == 2 and sorted(first["classes"]) == [0, 1]
    second = call(*arguments(place, "--json"))
    assert second["observed"] == 299 and second["adaptations"] == 5
    assert second["prequential_accuracy"] > 0.9 and second["store_bytes"] > 0
    assert sum(second["stored"].values()) > 200
    kept = json.loads((place / "state" / "summary.json").read_text())
    assert kept == second and kept["points"][-1]["labelled"] == 275
    assert sum(point["samples"] for point in kept["points"]) == 275
    assert "299 samples" in (place / "state" / "report.html").read_text()
    # There is nothing new.
    assert "299 samples, 299 labelled, 1 refused" in call(*arguments(place))


def test_what_it_leaves_is_room_for_it_the_next_time(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of 4 MiB a store once did not open again, as summary and page had taken from its room."""
    folder = place / "state"

    def usage(_: Path) -> SimpleNamespace:
        # A folder takes a block as well.
        taken = sum(512 * each.stat().st_blocks for each in folder.glob("*"))
        return SimpleNamespace(free=2**22 - taken - (4096 if folder.exists() else 0))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    first = fitting_capacity(folder, None, 0)
    call(*arguments(place))
    assert {"samples.db", "summary.json", "report.html"} <= {each.name for each in folder.iterdir()}
    assert first <= fitting_capacity(folder, None, 0) <= first + 2**16
    # Somebody else's file is not taken for its own.
    (folder / "holiday.jpg").write_bytes(bytes(2**20))
    assert fitting_capacity(folder, None, 0) < first - 2**19


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts the bytes that Linux counts")
@pytest.mark.parametrize("batch", [1, 32])
def test_a_row_is_not_written_many_times_over(place: Path, batch: int) -> None:
    """Small disks wear out: a row of 32 bytes once took 25 kB of logs and pages; 1.3 is usual."""

    def written() -> int:
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(told["wchar"])

    before = written()
    said = call(*arguments(place, "--json", "--batch", str(batch)), "--every", "1000000")
    assert said["observed"] == 299
    assert (written() - before) / said["observed"] < 3_000


def test_it_says_how_it_goes_while_it_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, written = iter(range(0, 10**6, 10)), []

    def write(path: Path, data: bytes, mode: int) -> None:
        written.append(json.loads(data)["observed"])

    monkeypatch.setattr(stream_module, "write_atomically", write)
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: float(next(clock)))
    done = command_line.call(monkeypatch, capsys, "stream", *arguments(place), "--limit", "20")
    told = done.err.splitlines()
    # Each third look at the clock is 30 seconds on.
    assert len(told) == len(written) - 1 >= 5
    assert [line.split()[0] for line in told] == [str(each) for each in written[:-1]]
    assert written == sorted(set(written)) and told[0].count("samples, ") == 1


def test_features_are_kept(place: Path) -> None:
    found = call(*arguments(place, "--json", "--latent", "1"))
    assert found["observed"] == 299 and found["prequential_accuracy"] > 0.7


@pytest.mark.parametrize(
    ("before", "now", "do"),
    [
        ((), ("--latent", "1"), "without --latent so far: leave it out"),
        (("--latent", "1"), (), "with --latent so far: give it as before"),
        (("--latent", "1"), ("--closed-form",), "with --latent so far: give it as before"),
        ((), ("--closed-form",), "same latent or head \\(--latent, --closed-form\\)"),
        (("--closed-form",), ("--latent", "1"), "without --latent so far: leave it out"),
    ],
)
def test_another_form_of_samples_is_refused_by_an_option_that_the_command_has(
    before: tuple[str, ...], now: tuple[str, ...], do: str, place: Path
) -> None:
    call(*arguments(place, "--limit", "60", *before))
    with pytest.raises(StreamDataError, match=do):
        call(*arguments(place, *now))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--input", "2,x"], "not a shape"),
        (["--learning-rate", "0"], "learning rate"),
        (["--source", "csv:none"], "there is no table"),
        (["--model", "stream_models:none"], "none"),
        (["--speedup", "0.5"], "below 1"),
        (["--detector", "adwinn"], "did you mean"),
        (["--capacity", "10"], "too small"),
        (["--policy", "fulll"], "did you mean"),
        (["--source", "socket:127.0.0.1:1x"], "give HOST:PORT"),
    ],
)
def test_one_clear_line(given: list[str], message: str, place: Path) -> None:
    with pytest.raises(ElasticError, match=message):
        call(*arguments(place, *given))


@pytest.mark.parametrize("source", ["csv", "dir"])
def test_taken_together_it_is_the_same_but_for_when_it_trains(source: str, place: Path) -> None:
    found = []
    for size in ("1", "32"):
        folder = place / size
        folder.mkdir()
        rows = np.random.default_rng(1).normal(size=(100, 4)).astype(np.float32)
        for name, part in (("a", rows[:40]), ("b", rows[40:])):
            np.savez(folder / f"{name}.npz", x=part, y=(part[:, 0] > 0).astype(int))
        spec = f"csv:{place}/table.csv" if source == "csv" else f"dir:{folder}"
        found.append(
            call(
                *arguments(place, "--json", "--batch", size, "--source", spec),
                "--every",
                "1000",
                "--state-dir",
                str(folder / "state"),
            )
        )
    assert found[0]["observed"] == (299 if source == "csv" else 100)
    for key in ("observed", "labelled", "accuracy", "refused", "classes", "stored"):
        assert found[0][key] == found[1][key], key


def test_a_file_is_put_away_only_when_its_samples_are_kept() -> None:
    read: list[str] = []

    def source() -> Iterator[SourceReading]:
        for file in ("a", "b"):
            yield SourceReading(x=file, y=0)
            yield SourceReading(x=file, y=1, ends=True)
            read.append(file)
        yield SourceReading(x="c", y=0)
        yield SourceReading()
        yield SourceReading(x="d", y=0, answer=lambda _: None)
        yield SourceReading(x="e", y=0)

    seen = [([each.x for each in some], list(read)) for some in _gathered(source(), 10)]
    assert seen == [
        (["a", "a"], []), (["b", "b"], ["a"]), (["c"], ["a", "b"]), ([None], ["a", "b"]),
        (["d"], ["a", "b"]), (["e"], ["a", "b"]),
    ]  # fmt: skip


def test_a_stream_that_never_fits_is_given_up_and_leaves_no_state(place: Path) -> None:
    for given, why in (
        (("--model", "stream_models:other", "--input", "4"),
         r"stream_models:other does not take a sample of shape 4 .*shapes cannot be multiplied"),
        (("--model", "stream_models:other", "--input", "5"),
         r"the first sample has 4 numbers, and --input 5 asks for 5"),
        (("--model", "stream_models:vague"), r"one table of class scores, not shape \(1, 2, 2\)"),
        (("--source", f"csv:{place}/none_fits.csv"), r"not one of the first.* 2 fields instead of 5"),
    ):  # fmt: skip
        (place / "none_fits.csv").write_text("a,b,c,d,label\n" + "1,0\n" * 200)
        with pytest.raises(ElasticError, match=why):
            call(*arguments(place), *given)
    assert not (place / "state" / "learner.state").exists()
    # The next attempt begins at the first row.
    assert "299 samples" in (told := call(*arguments(place)))
    assert "refused: 'a' in column 'a' is not a number (1 times)" in told


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("a,b,c,d,label\n1,2,3\n1,2,4\n", r"not one of 2 readings fits: 3 fields instead of 5 \(2 times\)"),
        ("a,b,label\n" + "1,2,0\n" * 30, r"2 numbers, and --input 4 asks for 4"),
        ("a;b;c;d;label\r1;2;3;4;0\r", "no column for a sample, only 'a;b;c;d;label': put a header with commas"),
        ("a,b,c,d,label\n1,2,3,4,cat\n", "label 'cat' is not a class number"),
        ("0.5,2,3,4,1\n" * 30, r"begins with the numbers '0.5, 2, 3, 4, 1', which would be lost"),
        ("0,2,1,4,1\n" * 30, "put a header into its first line"),
        ("a,b,c,label,label\n1,2,3,0,1\n", "has 2 columns 'label'"),
        ("a,b,c,d,label\n1,2,1_0,4,1\n", "'1_0' in column 'c' is not a number"),
    ],
)  # fmt: skip
def test_a_table_of_which_nothing_fits_is_an_error(
    rows: str, why: str, place: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = ("stream", *arguments(place, "--input", "4"))
    if "cat" in rows:
        assert command_line.call(monkeypatch, capsys, *given).status == 0
    (place / "short.csv").write_text(rows)
    done = command_line.call(monkeypatch, capsys, *given, "--source", f"csv:{place}/short.csv")
    assert done.status == 65 and re.search(why, done.err), done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_table_that_was_cut_off_is_not_read_again_and_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.call(monkeypatch, capsys, "stream", *arguments(place)).status == 0
    (place / "table.csv").write_bytes((place / "table.csv").read_bytes()[:500])
    done = command_line.call(monkeypatch, capsys, "stream", *arguments(place), "--follow")
    assert done.status == 65 and "is shorter now" in done.err
    # A table that is not there may come: that is asked again.
    (place / "table.csv").unlink()
    done = command_line.call(monkeypatch, capsys, "stream", *arguments(place), "--follow")
    assert done.status == 1 and "there is no table" in done.err


def test_words_are_whole_numbers(place: Path) -> None:
    np.savez(place / "words.npz", x=np.ones((20, 3), np.int64), y=[0, 1] * 10)
    told = call(
        *arguments(place, "--json", "--source", f"dir:{place}"), "--input", "3",
        "--model", "stream_models:words",
    )  # fmt: skip
    assert told["observed"] == 20


def test_a_table_of_words_and_files_of_bytes_are_taken_as_the_models_numbers(place: Path) -> None:
    (place / "words.csv").write_text("a,b,c,label\n" + "1,8,3,0\n" * 19 + "1,2.5,3,1\n1,inf,3,1\n")
    told = call(
        *arguments(place, "--json", "--source", f"csv:{place}/words.csv"), "--input", "3",
        "--model", "stream_models:words",
    )  # fmt: skip
    assert told["observed"] == 19
    assert told["refused"]["a number is not whole, and the model takes whole numbers"] == 1
    bytes_ = np.full((20, 2, 2), 255, np.uint8)
    np.savez(place / "bytes.npz", x=bytes_, y=[0, 1] * 10)
    given = ("--json", "--source", f"dir:{place}", "--state-dir", str(place / "bytes"))
    assert call(*arguments(place, *given))["observed"] == 20


def test_what_was_not_forgotten_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(*arguments(place))
    own = ["--model", "stream_models:tiny", "--input", "2,2", "--state-dir", str(place / "state")]
    # No weight matters a thousand times as much to a few as to all.
    monkeypatch.setattr("fl_elastic.streaming.step_training.dampen_body", lambda *_, **__: 0)
    done = command_line.call(monkeypatch, capsys, "stream", "forget", *own, "--ids", "1,2,9999999")
    assert done.status == 1 and "2 of 3 samples erased" in done.out
    assert "the model has not forgotten them" in done.err and len(done.err.splitlines()) == 1


def test_a_class_is_forgotten_by_the_command_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(*arguments(place))
    own = ["--model", "stream_models:tiny", "--input", "2,2", "--state-dir", str(place / "state")]
    for more, why in (
        (own, "say what to forget"),
        ([*own, "--ids", "999999"], "none of these samples is here"),
        ([*own[:-1], str(place), "--ids", "1"], "no stream's store"),
    ):
        refused = CliRunner().invoke(stream_app, ["forget", *more])
        assert isinstance(refused.exception, ElasticError) and why in str(refused.exception)
    forget = ("stream", "forget", *own, "--label", "1")
    done = command_line.call(monkeypatch, capsys, *forget, "--alpha", "1.2", "--json")
    assert done.status == 0, done.err
    came = json.loads(done.out)
    assert came["examples"] == came["deleted"] > 0 and came["weights"] > 0
    assert came["theirs_after"]["samples"] == came["examples"]
    again = command_line.call(monkeypatch, capsys, *forget)
    assert again.is_one_line_of_error() and "none of these samples is here" in again.err


def test_a_head_in_closed_form_goes_on_and_forgets_exactly(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    solved = ("--closed-form", "--remember", "500")
    first = call(*arguments(place, *solved, "--limit", "150", "--json"))
    whole = call(*arguments(place, *solved, "--json"))
    assert first["observed"] == 149 and whole["observed"] == 299
    assert whole["accuracy"] > 0.9 and whole["training_seconds"] < 10
    own = ["--model", "stream_models:tiny", "--input", "2,2", "--state-dir", str(place / "state")]
    forget = ("stream", "forget", *own, *solved, "--ids", "1,2,3")
    done = command_line.call(monkeypatch, capsys, *forget)
    assert done.status == 0 and "subtracted, exactly" in done.out
    for more, why in (
        (("--closed-form",), "remember=500"),
        (("--remember", "500"), "give --closed-form"),
        ((*solved, "--latent", "1"), "leave --latent out"),
        (("--closed-form", "--remember", "0"), "remember 0"),
        (("--read", "auto"), "give --closed-form"),
        ((*solved, "--read", "inside"), "not of the form"),
        ((*solved, "--read", "9@flat"), "no module '9'"),
        ((*solved, "--read", "auto"), "places chosen beforehand"),
        ((*solved, "--read", "2@flat"), "of another model"),
    ):
        refused = command_line.call(monkeypatch, capsys, "stream", *arguments(place, *more))
        assert refused.status in (1, 65) and why in refused.err
        assert len(refused.err.splitlines()) == 1


def test_a_head_in_closed_form_reads_where_it_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    solved = ("--closed-form", "--read", "input@flat+2@flat", "--json")
    first = call(*arguments(place, *solved, "--limit", "150"))
    assert first["observed"] == 149 and first["reads"] == "input@flat+2@flat"
    own = ["--model", "stream_models:tiny", "--input", "2,2", "--state-dir", str(place / "state")]
    done = command_line.call(monkeypatch, capsys, "stream", "forget", *own, *solved, "--label", "1")
    assert done.status == 0 and json.loads(done.out)["exact"]
    assert call(*arguments(place, *solved))["observed"] == 299


@pytest.mark.parametrize(
    "number", slow_unless(signal.SIGTERM.__eq__, [signal.SIGTERM, signal.SIGINT])
)
def test_a_service_that_is_stopped_has_saved(number: int, place: Path) -> None:
    command = "import typer; from fl_elastic.cli.stream import stream; typer.run(stream)"
    with (place / "err").open("w") as errors:
        service = subprocess.Popen(
            [sys.executable, "-c", command, *arguments(place, "--follow", "--json")],
            cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPROFILEIMPORTTIME": "1"},
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not (place / "state" / "learner.state").exists() and time.monotonic() < end:
            # One that has ended by itself is not waited for.
            assert service.poll() is None
            time.sleep(0.05)
        service.send_signal(number)
        told, _ = service.communicate(timeout=60)
    finally:
        service.kill()
    assert service.returncode == 0
    imported = {line.split("|")[-1].strip() for line in (place / "err").read_text().splitlines()}
    assert "torch" in imported and "torch._dynamo" not in imported
    said = json.loads(told)
    assert said["observed"] >= 1
    handled = said["observed"] + sum(said["refused"].values())
    # Two, as the table has one bad row, and a command none of whose rows fit ends with an error.
    again = call(*arguments(place, "--json", "--limit", "2"))
    assert again["observed"] + sum(again["refused"].values()) == min(handled + 2, 300)
