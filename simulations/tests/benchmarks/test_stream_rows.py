"""The benchmark of streams: a small stream through every method, hand-made summaries, the committed table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.benchmarks import stream_cell as cell
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream import bench_stream, write_streams_page
from fl_elastic_simulations.benchmarks.stream_methods import LATENT, METHODS, READS, REFERENCE
from fl_elastic_simulations.benchmarks.stream_summary import (
    stream_cells,
    stream_markdown,
    summarise_stream,
)
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS, Labelled, Stream
from fl_elastic_simulations.cli.bench import bench


def clouds(_: Path, seed: int) -> Stream:
    """Two clouds of points, known; then two more somewhere else."""
    draw = np.random.default_rng(seed)
    centres = np.array([[3, 0], [-3, 0], [0, 3], [0, -3]])

    def some(labels: list[int], size: int) -> Labelled:
        y = draw.choice(labels, size)
        x = (centres[y] + 0.3 * draw.normal(size=(size, 2))).astype(np.float32)
        return Labelled(x, y.astype(np.int64))

    first, second = some([0, 1], 150), some([2, 3], 150)
    samples = Labelled(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]))
    tests = (some([0, 1], 60), some([2, 3], 60))
    return Stream(some([0, 1], 100), samples, (0, 150), tests)


def dense(_: Path, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lower = [nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
        return nn.Sequential(*lower, nn.Linear(16, outputs))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    task = replace(
        TASKS["electricity"], title="Clouds", read=clouds, build=dense, every=30, steps=20,
        latent_steps=20, together=10, rate=0.01, epochs=60,
    )  # fmt: skip
    monkeypatch.setitem(TASKS, "clouds", task)
    yield "clouds"
    cell._at_home.cache_clear()


@pytest.mark.slow
def test_replay_learns_what_is_new_and_keeps_what_was(small: str) -> None:
    rows = {
        method: cell.run_stream(small, method, 0, None)
        for method, how in METHODS.items()
        if TASKS[small].has(how.read)
    }
    still = rows["no adaptation"]
    assert still["average"] == pytest.approx(0.5, abs=0.05)
    assert still["adaptations"] == 0
    assert still["adapting_seconds"] == 0
    for method in (REFERENCE, "full, DER++"):
        assert rows[method]["average"] > 0.95
        assert rows[method]["forgetting"] < 0.05
    assert rows["full, no replay"]["forgetting"] > rows[REFERENCE]["forgetting"]
    assert rows[LATENT]["average"] > 0.8
    assert rows[READS]["average"] > 0.9 and "@" in rows[READS]["reads"]
    assert rows[READS]["adapting_seconds"] > rows[READS]["choosing_seconds"] > 0
    for row in rows.values():
        assert row["samples"] == 300
        assert [len(line) for line in row["table"]] == [2, 2]
        assert row["drifts"] == 1
        assert row["store_bytes"] <= TASKS[small].capacity
    assert rows[LATENT]["store_bytes"] <= TASKS[small].capacity / 10


def row(average: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "average": average, "anytime": 0.5, "forgetting": 0.1, "backward_transfer": -0.1,
        "forward_transfer": 0.0, "prequential": 0.6, "delay": None, "false_alarms": 0,
        "recovery": 40.0, "adapting_seconds": seconds, "other_seconds": 1.0, "peak_bytes": 10**6,
        "store_bytes": 1000, "stored": 5, "trained_share": 0.5, "undone": 0,
        "curve": [[50, 0.4], [100, 0.8]], "starts": [0, 60], **more,
    }  # fmt: skip


def test_a_summary_counts_seeds_that_the_reference_has_too() -> None:
    rows = {
        f"weather | {REFERENCE} | 0": row(0.8, 8.0),
        f"weather | {REFERENCE} | 1": row(0.6, 4.0),
        f"weather | {LATENT} | 0": row(0.7, 2.0, delay=10.0),
        f"weather | {LATENT} | 1": row(0.6, 1.0),
        f"weather | {LATENT} | 2": row(0.1, 9.0),
    }
    found = summarise_stream(rows, "weather")
    latent = found[LATENT]
    assert latent["seeds"] == 2
    assert latent["score"] == pytest.approx(0.65)
    assert latent["against_reference"] == pytest.approx(-0.05)
    # Student's t with one degree of freedom: 12.706 * sd / sqrt(2), sd = 0.1 / sqrt(2).
    assert latent["interval"] == pytest.approx(12.706 * 0.05)
    assert latent["adapting_seconds_ratio"] == pytest.approx(0.25)
    assert latent["delay"] == 10.0
    assert found[REFERENCE]["delay"] is None
    assert stream_cells(latent)["Against"] == "-5.0 \N{PLUS-MINUS SIGN} 63.5"


def test_page_and_markdown_name_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")
    rows = {f"weather | {method} | {seed}": row(0.5, 1.0) for method in METHODS for seed in (0, 1)}
    rows |= {f"summary weather | {m}": r for m, r in summarise_stream(rows, "weather").items()}
    html = write_streams_page(rows, {"python": "3"}, tmp_path / "stream.html").read_text()
    lines = stream_markdown(rows, "weather")
    assert len(lines) == 2 + len(METHODS)
    assert len({line.count("|") for line in lines}) == 1
    for method in METHODS:
        assert f'<th scope="row" title="{method}">' in html
    figures = json.loads(html.partition('id="figures">')[2].partition("</script>")[0])
    (curves,) = figures.values()
    assert [line["name"] for line in curves["data"]] == list(METHODS)
    assert all((line["x"], line["y"]) == ([50, 100], [0.4, 0.8]) for line in curves["data"])
    assert [mark["x0"] for mark in curves["layout"]["shapes"]] == [60]
    for heading, text in stream_cells(rows[f"summary weather | {LATENT}"]).items():
        assert heading.replace("-", "\u2011") in html and f">{text}</td>" in html


def test_an_unknown_stream_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="wether"):
        bench_stream(Results(tmp_path / "s.json"), tasks=["wether"])


def test_the_page_of_finished_rows_is_written_without_measuring(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "results"
    for name in ("stream", "federation"):
        table = tmp_path / f"{name}.json"
        table.write_bytes((source / f"{name}.json").read_bytes())
        done = CliRunner().invoke(bench, [name, "--page", "--output", str(table)])
        assert done.exit_code == 0, done.output
        assert done.output.strip().endswith(f"{name}.html")
        assert table.read_bytes() == (source / f"{name}.json").read_bytes()
        measured = json.loads(table.read_text())["environment"]
        page = table.with_suffix(".html").read_text()
        for key, value in measured.items():
            assert f"<dt>{key}</dt><dd>{value}</dd>" in page
        # Hover, zoom and legends need it; a page brings it along.
        assert "plotly.js v" in page
    missing = CliRunner().invoke(bench, ["stream", "--page", "--output", str(tmp_path / "no.json")])
    assert isinstance(missing.exception, ScenarioError)


def test_names_of_a_row_cannot_end_the_script_that_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")
    hostile = "</script><script>hurt()</script>"
    point = {"labelled": 5, "accuracy": 1.0, "stored": {"0": 1}}
    stream = {
        "points": [point], "groups": [hostile], "drift_marks": [],
        "adapted": [{"at": 1, "undone": "", "trained": [0]}],
    }  # fmt: skip
    rows = {f"weather | {REFERENCE} | 0": row(0.5, 1.0, stream=stream)}
    html = write_streams_page(rows, {hostile: hostile}, tmp_path / "stream.html").read_text()
    assert html.count("<script") == html.count("</script") == 3
    block = html.partition('id="figures">')[2].partition("</script>")[0]
    assert list(json.loads(block)) == [
        f"plot-stream-0-{name}" for name in ("accuracy", "trained", "store")
    ]
    assert not set("<>&") & set(block)
