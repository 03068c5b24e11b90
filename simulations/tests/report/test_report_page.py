"""The page as a file: what it says, what it must not hold, how it is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fl_elastic.errors import ElasticError
from fl_elastic_simulations.report.page import write_page

pytest.importorskip("plotly", reason="plotly is not installed; it comes with the extra simulation")

Make = Callable[..., dict[str, Any]]

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror='window.hurt=1'>\"&"


PLOTLY_TAGS = {"<b>", "</b>", "<br>", "<extra>", "</extra>"}


def drawn_texts(value: Any) -> list[str]:
    """Return all texts anywhere in the figures."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in drawn_texts(part)]


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text by enclosing tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.cells: list[tuple[str, dict[str, str | None], str]] = []
        self._open = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append((tag, dict(attrs)))
        self.cells.append((tag, dict(attrs), ""))
        self._open = tag

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.texts.append((self._open, data))
        tag, attrs, before = self.cells.pop() if self.cells else ("", {}, "")
        self.cells.append((tag, attrs, before + data.strip()))

    def count(self, tag: str) -> int:
        """Return how many tags of this name there are."""
        return sum(name == tag for name, _ in self.tags)

    def text(self) -> str:
        """Return the text that a reader sees."""
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))

    def data(self) -> Any:
        """Return the figures that the script draws, by id; NaN and infinity would be no JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        block = next(data for tag, data in self.texts if tag == "script")
        return json.loads(block, parse_constant=refuse)

    def grid(self, section: str) -> list[list[str]]:
        """Return the cells of a section's table, its headings first; every cell has its heading beside it."""
        rows: list[list[str]] = []
        here = False
        parts = iter(self.cells)
        for tag, attrs, text in parts:
            here = attrs.get("id") == section if tag == "section" else here
            if here and tag == "tr":
                rows.append([])
            elif here and tag in ("th", "td"):
                if tag == "td":
                    assert attrs["data-of"] == rows[0][len(rows[-1])]
                rows[-1].append(text)
        return [[text.replace("\u2011", "-") for text in row] for row in rows]

    def plots(self) -> set[str]:
        """Return the ids of the large figures."""
        return {name for name in self.data() if name.startswith("plot-")}


@pytest.fixture
def light_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a comment in the place of the five megabytes of plotly.js."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


def test_the_page_asks_no_network_for_anything(make_summary: Make, tmp_path: Path) -> None:
    page = Page(write_page(make_summary(), tmp_path / "report.html"))
    loading = {"src", "srcset", "data", "poster", "action", "background", "cite"}
    assert page.count("script") == 3
    assert [value for _, attrs in page.tags for key, value in attrs.items() if key in loading] == []
    assert [a["href"] for _, a in page.tags if "href" in a] == ["data:,"]
    style = "".join(data for tag, data in page.texts if tag == "style")
    assert "url(" not in style and "@import" not in style
    policy = next(a["content"] for t, a in page.tags if "Content-Security-Policy" in a.values())
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.usefixtures("light_plotly")
def test_the_page_says_what_the_summary_says(make_summary: Make, tmp_path: Path) -> None:
    summary = make_summary()
    path = write_page(summary, tmp_path / "report.html")
    page = Page(path)
    text = page.text()
    assert path == tmp_path / "report.html"
    for words in (
        "Ten unequal devices, digits",
        "10 clients of 6 device classes train digits_cnn on digits for 40 rounds with 3 seeds.",
        "simulated",
        "computed from measured step costs and each device's slowdown and link",
        "Target: 93.5 % accuracy (final accuracy of full minus 1 point).",
        "13 min 26 s",
        "42.0 MB (44 %)",
        "Raspberry Pi Zero 2 W",
        "two cores, x86_64",
        "0, 1, 2",
    ):
        assert words in text
    assert {"results", "time", "uplink", "coverage", "speed"} <= {
        attrs["id"] for tag, attrs in page.tags if tag == "section" and attrs["id"]
    }
    assert page.plots() == {"plot-time", "plot-round", "plot-uplink", "plot-speed"}
    assert set(page.data()) - page.plots() == {f"coverage-{panel}" for panel in range(6)}
    places = [attrs["id"] for tag, attrs in page.tags if attrs.get("class") == "plot"]
    assert sorted(map(str, places)) == sorted(page.data())


@pytest.mark.usefixtures("light_plotly")
def test_measured_times_are_not_called_simulated(make_summary: Make, tmp_path: Path) -> None:
    page = Page(write_page({**make_summary(), "simulated": False}, tmp_path / "report.html"))
    assert "simulated" not in page.text().lower()
    assert "All times are measured." in page.text()


@pytest.mark.usefixtures("light_plotly")
def test_no_text_of_the_summary_becomes_markup(make_summary: Make, tmp_path: Path) -> None:
    plain = make_summary(rounds=3)
    texts = r'"(full|pi_5|fc|Laptop|digits|digits_cnn|1\.41\.0|flwr|(?:Ten|final accuracy)[^"]*)"'
    hostile = json.loads(
        re.sub(texts, lambda match: json.dumps(f"{match[1]}{HOSTILE}"), json.dumps(plain))
    )
    before = Page(write_page(plain, tmp_path / "plain.html"))
    after = Page(write_page(hostile, tmp_path / "hostile.html"))
    assert [tag for tag, _ in after.tags] == [tag for tag, _ in before.tags]
    assert not any(key.startswith("on") for _, attrs in after.tags for key in attrs)
    for name in ("full", "Laptop", "digits_cnn", "1.41.0", "Ten unequal devices, digits"):
        assert f"{name}{HOSTILE}" in after.text()
    named = [trace for trace in after.data()["plot-time"]["data"] if "name" in trace]
    assert named[0]["name"].startswith("full&lt;/script&gt;")
    # Plotly reads some markup in all of its texts: none of the summary's comes through.
    for texts in (drawn_texts(after.data()), drawn_texts(before.data())):
        assert {tag for text in texts for tag in re.findall(r"<[^>]*>", text)} == PLOTLY_TAGS


@pytest.mark.usefixtures("light_plotly")
def test_the_data_cannot_end_their_block(make_summary: Make, tmp_path: Path) -> None:
    text = write_page(make_summary(rounds=3), tmp_path / "report.html").read_text(encoding="utf-8")
    block = text.partition('id="figures">')[2].partition("</script>")[0]
    assert "\\u003cbr\\u003e" in block
    assert not set("<>&") & set(block)


@pytest.mark.usefixtures("light_plotly")
@pytest.mark.parametrize(
    ("key", "note", "plots"),
    [
        ("history", "nothing to draw", 1),
        ("coverage", "no coverage", 4),
        ("devices", "nothing to draw", 3),
        ("seconds_to_target", "not reached", 4),
        ("final_accuracy", "\N{EN DASH}", 4),
        ("uplink_bytes", "\N{EN DASH}", 4),
    ],
)
def test_a_part_that_every_method_misses_is_said_to_be_missing(
    make_summary: Make, tmp_path: Path, key: str, note: str, plots: int
) -> None:
    summary = make_summary()
    assert note not in Page(write_page(summary, tmp_path / "complete.html")).text()
    for method in summary["methods"].values():
        method[key] = None
    page = Page(write_page(summary, tmp_path / "report.html"))
    assert note in page.text()
    assert len(page.plots()) == plots


@pytest.mark.usefixtures("light_plotly")
def test_a_summary_with_nothing_but_a_method_gives_a_page(tmp_path: Path) -> None:
    page = Page(write_page({"methods": {"full": {}}}, tmp_path / "report.html"))
    assert page.data() == {}
    assert "Clients train one model." in page.text()


@pytest.mark.usefixtures("light_plotly")
def test_a_name_that_no_encoding_can_write_spoils_nothing(tmp_path: Path) -> None:
    path = write_page({"title": "odd \ud800 title", "methods": {"full": {}}}, tmp_path / "r.html")
    assert "odd " in path.read_text(encoding="utf-8")


@pytest.mark.usefixtures("light_plotly")
def test_the_page_comes_into_place_in_one_step(
    make_summary: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "report.html"
    moves: list[tuple[Path, Path, bool]] = []
    real = os.replace

    def watched(source: Path, place: Path) -> None:
        moves.append((Path(source), Path(place), Path(source).read_text().endswith("</html>\n")))
        real(source, place)

    monkeypatch.setattr(os, "replace", watched)
    write_page(make_summary(rounds=2), str(target))
    [(source, place, whole)] = moves
    assert (source.parent, place, whole) == (target.parent, target, True)
    assert os.listdir(target.parent) == ["report.html"]


@pytest.mark.usefixtures("light_plotly")
def test_a_failure_leaves_the_old_page_and_no_rubbish(
    make_summary: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def full_disk(source: Path, place: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ElasticError, match="No space left on device; choose another place"):
        write_page(make_summary(rounds=2), target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.usefixtures("light_plotly")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ElasticError, match=r"cannot write the report '.*file/report.html'"):
        write_page({"methods": {"full": {}}}, tmp_path / "file" / "report.html")


def test_what_writes_pages_is_imported_only_for_a_page() -> None:
    code = (
        "import sys, fl_elastic_simulations.report, fl_elastic_simulations.report.stream_page; "
        "print([name for name in ('plotly', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("light_plotly")
def test_the_same_summary_gives_the_same_page(make_summary: Make, tmp_path: Path) -> None:
    first, second = (
        write_page(make_summary(), tmp_path / name).read_bytes() for name in ("a.html", "b.html")
    )
    assert first == second


def test_templates_travel_in_the_app_bundle() -> None:
    build = pytest.importorskip("flwr.cli.build", reason="Flower's builder is not there")
    place = Path(str(files("fl_elastic_simulations"))).parent
    paths = {
        str(path.relative_to(place)): path
        for folder in ("fl_elastic_simulations", "scenarios")
        for path in (place / folder).rglob("*.*")
    }
    config = tomllib.loads((place / "pyproject.toml").read_text())
    carried = build.get_filtered_fab_paths(paths, config)
    assert len([path for path in carried if "/report/templates/" in path]) == 3


def test_where_the_cut_lay_and_what_was_kept_is_said(make_summary: Make, tmp_path: Path) -> None:
    summary = make_summary()
    assert "cuts" not in {
        dict(attributes).get("id")
        for _, attributes in Page(write_page(summary, tmp_path / "none.html")).tags
    }
    name = list(summary["methods"])[1]
    summary["methods"][name] |= {
        "cuts": [
            {"seed": 0, "simulated_seconds": 12.0, "group": HOSTILE},
            {"seed": 0, "simulated_seconds": 60.0, "group": ""},
            {"seed": 1, "simulated_seconds": 9.0, "group": "layer3.1.conv2"},
        ],
        "features_found": 75, "features_computed": 25,
    }  # fmt: skip
    page = Page(write_page(summary, tmp_path / "cuts.html"))
    assert "cuts" in {dict(attributes).get("id") for _, attributes in page.tags}
    cells = [text for tag, text in page.texts if tag == "td"]
    for text in ("everything is trained", "layer3.1.conv2", "75 %", "12.0 s"):
        assert text in cells
    assert page.count("img") == 0


def with_clients(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary with what a simulation says of its clients and setting."""
    for position, method in enumerate(summary["methods"].values()):
        method["clients"] = [
            {
                "client": index, "device": "pi_4b", "examples": 40 + index, "rounds": 3,
                "accuracy": 0.9 - 0.1 * index - 0.01 * position, "seconds": 12.5,
                "uplink_bytes": 1_500_000, "downlink_bytes": 2_000_000,
            }
            for index in range(3)
        ]  # fmt: skip
        method["worst_client"], method["tenth_percentile"] = 0.7, 0.7
        method["best_client"] = 0.95
    return summary | {
        "labels": [[5, 0, 3], [1, 1, 1], [0, 9, 0]],
        "scenario": {"title": "<b>mine</b>", "seeds": [0]},
        "command": "fl-elastic simulate mine.toml",
    }


def test_clients_classes_and_setting_are_shown(make_summary: Make, tmp_path: Path) -> None:
    path = write_page(with_clients(make_summary()), tmp_path / "report.html")
    page = Page(path)
    for said in ("Worst client", "Tenth percentile", "70.0 %", "95.0 %", "Each client", "1.50 MB"):
        assert said in page.text(), said
    assert "fl-elastic simulate mine.toml" in page.text() and "<b>mine</b>" in page.text()
    (split,) = page.data()["plot-split"]["data"]
    assert split["z"] == [[5, 0, 3], [1, 1, 1], [0, 9, 0]]


@pytest.mark.usefixtures("light_plotly")
def test_what_was_left_out_and_what_devices_spend_is_shown(
    make_summary: Make, tmp_path: Path
) -> None:
    summary = with_clients(make_summary(rounds=3))
    full, elastic = summary["methods"].values()
    late = f"past the deadline: training takes … s, the round … s {HOSTILE}"
    full["rejections"] = [
        {"seed": seed, "round": number, "reason": late, "updates": 2}
        for seed in (0, 1)
        for number in (1, 2, 4)
    ] + [{"seed": 0, "round": 3, "reason": "no memory", "updates": 1}]
    summary["devices"][2] |= {"memory_bytes": 4_000_000}
    full["devices"]["pi_4b"] |= {"peak_bytes": 3_500_000.0}
    elastic["devices"]["pi_4b"] |= {"peak_bytes": None}
    elastic["devices"]["pi_5"]["peak_bytes"] = 900_000.0
    page = Page(write_page(summary, tmp_path / "report.html"))
    assert page.grid("rejected") == [
        ["Method", "Reason", "Updates", "Rounds"],
        ["full", late, "12", "1\u20132, 4"],
        ["full", "no memory", "1", "3"],
    ]
    assert page.grid("memory") == [
        ["Device", "Limit", "full", "elastic"],
        ["Raspberry Pi 4B", "4.00 MB", "3.50 MB", "\u2013"],
        ["Raspberry Pi 5", "none", "\u2013", "900 kB"],
    ]
    assert page.count("img") == 0


@pytest.mark.usefixtures("light_plotly")
def test_on_a_phone_every_table_is_cards_and_long_texts_break(
    make_summary: Make, tmp_path: Path
) -> None:
    page = Page(write_page(make_summary(rounds=2), tmp_path / "report.html"))
    style = "".join(data for tag, data in page.texts if tag == "style")
    narrow = style.partition("@media (max-width: 640px)")[2]
    for rule in (
        "table, tbody, tr, tbody th, td { display: block; }",
        "td::before { content: attr(data-of)",
        "td.long::before { display: block; }",
    ):
        assert rule in narrow, rule
