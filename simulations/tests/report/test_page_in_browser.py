"""The page in a real browser: that everything is drawn, fits the screen and answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_stream_page import summary as stream_summary

from fl_elastic_simulations.report.page import write_page
from fl_elastic_simulations.report.stream_page import write_stream_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver on the path", allow_module_level=True)
pytest.importorskip("plotly", reason="plotly is not installed; it comes with the extra simulation")
pytest.importorskip("selenium", reason="selenium is not installed; it comes with the extra dev")

from selenium.webdriver import Chrome, ChromeOptions  # noqa: E402 - only where it is installed
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

Make = Callable[..., dict[str, Any]]

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
DESKTOP, PHONE = 1280, 390

SIZES = """
const sizes = (selector) => [...document.querySelectorAll(selector)].map((element) => {
  const box = element.getBoundingClientRect();
  return [box.width, box.height];
});
return sizes(arguments[0]);
"""

# Everything of the page but the inside of the table's box and the parts that a plot clips itself.
TOO_WIDE = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("main *, footer *, svg.main-svg")]
  .filter((element) => !element.closest(".scroll > *, .hidden"))
  .filter((element) => !element.ownerSVGElement)
  .filter((element) => element.getBoundingClientRect().right > wide + 0.5)
  .map((element) => element.outerHTML.slice(0, 120));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start one browser for all tests, with a profile of its own."""
    options = ChromeOptions()
    assert CHROMIUM is not None and DRIVER is not None
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_summary: Make) -> Path:
    """Write the page of a realistic run."""
    summary = make_summary(("full", "elastic", "random"))
    return write_page(summary, tmp_path_factory.mktemp("page") / "report.html")


def emulate(browser: Chrome, width: int, scheme: str = "light") -> None:
    """Set the width of the screen and whether the reader prefers dark."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def settled(browser: Chrome) -> None:
    """Wait until everything is drawn."""
    drawn = "return document.documentElement.dataset.drawn"
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(drawn) == "yes")


def opened(browser: Chrome, path: Path, width: int = DESKTOP, scheme: str = "light") -> None:
    """Open a page and wait until it is drawn; earlier log entries are thrown away."""
    emulate(browser, width, scheme)
    for log in ("browser", "performance"):
        entries(browser, log)
    browser.get(path.as_uri())
    settled(browser)


def entries(browser: Any, log: str) -> list[dict[str, Any]]:
    """Return what a log holds since it was last read."""
    found: list[dict[str, Any]] = browser.get_log(log)
    return found


def complaints(browser: Chrome) -> list[str]:
    """Return what the console says against the page since it was opened."""
    return [
        entry["message"]
        for entry in entries(browser, "browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def sizes(browser: Chrome, selector: str) -> list[list[float]]:
    """Return width and height of everything that the selector finds."""
    found: list[list[float]] = browser.execute_script(SIZES, selector)
    return found


def cells(browser: Chrome) -> list[str]:
    """Return the picture of each heat map."""
    images = browser.find_elements(By.CSS_SELECTOR, "#coverage .heatmaplayer image")
    return [str(image.get_attribute("href")) for image in images]


def check_drawn_and_fitting(browser: Chrome, width: int) -> None:
    """Check that every plot is there, and that nothing is wider than the screen."""
    for name in ("time", "uplink"):
        lines = sizes(browser, f"#plot-{name} .scatterlayer .lines path.js-line[style*='2.5px']")
        bands = sizes(browser, f"#plot-{name} .scatterlayer .fills path.js-fill")
        assert len(lines) == len(bands) == 3
        assert all(across > 20 and high > 50 for across, high in lines + bands)
    bars = sizes(browser, "#plot-speed .barlayer .point path")
    assert len(bars) == 3 * 2 * 6
    assert all(across > 20 and high > 3 for across, high in bars)
    heat = sizes(browser, "#coverage .heatmaplayer image")
    assert len(heat) == 6
    assert all(across > 100 and high > 100 for across, high in heat)
    assert complaints(browser) == []
    # It does not scroll sideways.
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(TOO_WIDE) == []


def check_table_and_legends(browser: Chrome) -> None:
    """Check that the table is whole, and that legends lie below their plots."""
    box = browser.find_element(By.CSS_SELECTOR, ".scroll")
    inside, outside = browser.execute_script(
        "return [arguments[0].scrollWidth, arguments[0].clientWidth]", box
    )
    assert inside <= outside
    cells = box.find_elements(By.CSS_SELECTOR, "td")
    headings = box.find_elements(By.CSS_SELECTOR, "thead th")
    assert len(cells) >= 2 * (len(headings) - 1)
    for cell in cells:
        place = cell.rect
        assert place["x"] >= 0 and place["x"] + place["width"] <= PHONE
        assert cell.get_attribute("data-of")
    for name in ("time", "uplink", "speed"):
        plot = browser.find_element(By.ID, f"plot-{name}").rect
        legend = browser.find_element(By.CSS_SELECTOR, f"#{name} .legend").rect
        assert legend["y"] >= plot["y"] + plot["height"]


def check_choice(browser: Chrome) -> None:
    """Check that choosing a method changes the heat maps."""
    values = "return document.getElementById('coverage-0').data.find((one) => one.visible).z"
    pictures = {}
    for position in (2, 1, 0):
        choice = browser.find_element(By.CSS_SELECTOR, f"input[name=coverage][value='{position}']")
        if position == 2:
            assert choice.is_selected()
        else:
            choice.find_element(By.XPATH, "..").click()
            settled(browser)
        drawn = cells(browser)
        assert len(drawn) == 6
        pictures[position] = (drawn[0], json.dumps(browser.execute_script(values)))
    assert len({picture for picture, _ in pictures.values()}) == 3
    assert len({shares for _, shares in pictures.values()}) == 3
    assert json.loads(pictures[0][1]) == [[1] * 40] * 12
    assert complaints(browser) == []


def check_legend(browser: Chrome) -> None:
    """Check that a button hides its method in every plot, and shows it again."""
    bars = "#plot-speed .barlayer .point path"
    lines = "#plot-time .scatterlayer path.js-line, #plot-uplink .scatterlayer path.js-line"
    before = len(sizes(browser, bars)), len(sizes(browser, lines))
    button = browser.find_element(By.CSS_SELECTOR, "#time button[data-method='1']")
    button.click()
    settled(browser)
    after = len(sizes(browser, bars)), len(sizes(browser, lines))
    assert after[0] == before[0] * 2 // 3
    assert after[1] == before[1] * 2 // 3
    twin = browser.find_element(By.CSS_SELECTOR, "#speed button[data-method='1']")
    assert twin.get_attribute("aria-pressed") == "false"
    twin.click()
    settled(browser)
    assert (len(sizes(browser, bars)), len(sizes(browser, lines))) == before


def check_dark(browser: Chrome) -> None:
    """Check that the plots follow the reader into the dark."""
    fill = (
        "return getComputedStyle(document.querySelector('#plot-time .xtick text')).fill"
        ".match(/\\d+/g).slice(0, 3).map(Number)"
    )
    light = browser.execute_script(fill)
    emulate(browser, DESKTOP, "dark")
    WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(fill) != light)
    dark = browser.execute_script(fill)
    assert sum(light) < 3 * 128 < sum(dark)


def check_hovering(browser: Chrome) -> None:
    """Check that hovering a line names its method."""
    plot = browser.find_element(By.ID, "plot-time")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    place = browser.execute_script(
        """
        const plot = document.getElementById("plot-time"), layout = plot._fullLayout;
        const trace = plot.data.find((one) => one.name === "elastic");
        return [
          layout.xaxis._offset + layout.xaxis.l2p(trace.x[9]) - plot.clientWidth / 2,
          layout.yaxis._offset + layout.yaxis.l2p(trace.y[9]) - plot.clientHeight / 2,
        ];
        """
    )
    ActionChains(browser).move_to_element_with_offset(
        plot, round(place[0]), round(place[1])
    ).perform()
    label = "#plot-time .hoverlayer .hovertext"
    WebDriverWait(browser, 10).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, label))
    shown = browser.find_element(By.CSS_SELECTOR, label).get_attribute("textContent") or ""
    assert "elastic" in shown
    assert "after round" in shown


def check_requests(browser: Chrome, page: Path) -> None:
    """Check that nothing was asked for but the page itself."""
    messages = [
        json.loads(entry["message"])["message"] for entry in entries(browser, "performance")
    ]
    wanted = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert page.as_uri() in wanted
    assert [url for url in wanted if not url.startswith(("file:", "data:", "blob:"))] == []


def check_narrow(browser: Chrome) -> None:
    """Check that a page that gets narrow is drawn anew."""
    emulate(browser, PHONE)
    narrow = "return document.querySelector('#plot-speed svg.main-svg').clientWidth"
    WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(narrow) < PHONE)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    assert browser.execute_script(TOO_WIDE) == []


def test_on_a_phone_in_the_dark_everything_is_drawn_and_fits(browser: Chrome, page: Path) -> None:
    opened(browser, page, PHONE, "dark")
    check_requests(browser, page)
    check_drawn_and_fitting(browser, PHONE)
    check_table_and_legends(browser)


def test_a_reader_chooses_hides_hovers_and_changes_the_screen(browser: Chrome, page: Path) -> None:
    opened(browser, page)
    check_choice(browser)
    check_legend(browser)
    check_hovering(browser)
    check_dark(browser)
    check_narrow(browser)
    assert complaints(browser) == []


@pytest.mark.slow
def test_on_a_desktop_everything_is_drawn_and_fits(browser: Chrome, page: Path) -> None:
    opened(browser, page)
    check_drawn_and_fitting(browser, DESKTOP)


def test_hostile_names_are_shown_and_not_run(
    browser: Chrome, tmp_path: Path, make_summary: Make
) -> None:
    summary = make_summary(("full", "elastic"), seeds=1, rounds=2)
    name = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
    summary["title"] = summary["devices"][0]["label"] = summary["groups"][0] = name
    summary["methods"][name] = summary["methods"].pop("elastic")
    opened(browser, write_page(summary, tmp_path / "hostile.html"))
    assert browser.execute_script("return window.hurt === undefined")
    assert browser.find_element(By.TAG_NAME, "h1").text == name
    assert browser.find_element(By.CSS_SELECTOR, "#time button[data-method='1']").text == name
    ticks = browser.find_elements(By.CSS_SELECTOR, "#plot-speed .ytick text")
    assert "".join((ticks[0].get_attribute("textContent") or "").split()) == "".join(name.split())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= DESKTOP
    assert complaints(browser) == []


def test_a_summary_with_gaps_and_long_texts_is_drawn_without_complaint(
    browser: Chrome, tmp_path: Path, make_summary: Make
) -> None:
    width = PHONE
    summary = make_summary(("full", "elastic", "head"), seeds=1, rounds=1)
    summary["groups"] = [f"features.denseblock{i}.denselayer{i}.conv" for i in range(70)]
    summary["methods"]["full"].update(history=[], coverage={}, devices={})
    summary["methods"]["elastic"]["seconds_to_target"] = None
    summary["methods"]["head"]["coverage"] = {"pi_5": [[1.0, None]]}
    reason = "client could not train: past the deadline " * 5
    summary["methods"]["head"]["rejections"] = [{"round": 1, "reason": reason, "updates": 2}]
    opened(browser, write_page(summary, tmp_path / "gaps.html"), width)
    assert len(sizes(browser, "#plot-time .scatterlayer path.js-line")) == 2
    assert len(sizes(browser, "#coverage .heatmaplayer image")) == 1
    # A long text leaves its heading whole.
    cell = browser.find_element(By.CSS_SELECTOR, "#rejected td.long")
    heading = "return parseFloat(getComputedStyle(arguments[0], '::before').width)"
    assert browser.execute_script(heading, cell) > 100
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(TOO_WIDE) == []
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_page_without_any_plot_still_reads(browser: Chrome, tmp_path: Path) -> None:
    opened(browser, write_page({"methods": {"full": {}}}, tmp_path / "bare.html"), PHONE)
    assert "nothing to draw" in browser.find_element(By.ID, "time").text
    assert complaints(browser) == []


def test_the_page_of_a_service_needs_no_script(browser: Chrome, tmp_path: Path) -> None:
    summary = stream_summary(groups=[f"layer{number}" for number in range(9)])
    emulate(browser, PHONE)
    entries(browser, "browser")
    browser.get(write_stream_page(summary, tmp_path / "report.html").as_uri())
    drawn = sizes(browser, "svg.still")
    assert len(drawn) == 3 and all(across > 200 and high > 50 for across, high in drawn)
    assert all(across > 0 for across, _ in sizes(browser, "svg.still rect"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    assert complaints(browser) == []


CUT_OFF = """
return [...document.querySelectorAll(".scroll")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1)
  .map((box) => [box.getAttribute("aria-label"), box.scrollWidth, box.clientWidth]);
"""


def test_tables_of_many_clients_are_whole_on_a_laptop_and_short_on_a_phone(
    browser: Chrome, tmp_path: Path, make_summary: Make
) -> None:
    summary = make_summary(("full", "elastic", "random"), seeds=1, rounds=4)
    for method in summary["methods"].values():
        # What is drawn takes seconds to load.
        method["coverage"] = {}
        method["clients"] = [
            {"client": place, "device": "pi_zero_2w", "examples": 1234, "accuracy": 0.987, "rounds": 24,
             "seconds": 216.0, "uplink_bytes": 6.24e6, "downlink_bytes": 6.24e6}
            for place in range(40)
        ]  # fmt: skip
    path = write_page(summary, tmp_path / "many.html")
    opened(browser, path, DESKTOP)
    assert browser.execute_script(CUT_OFF) == []
    assert browser.execute_script("return document.querySelector('#clients .fold').open")
    opened(browser, path, PHONE)
    # Forty cards of a dozen lines would be thirty screens: they are folded until somebody asks.
    assert browser.execute_script("return document.querySelector('#clients').offsetHeight") < 400
    browser.find_element(By.CSS_SELECTOR, "#clients .fold > summary").click()
    assert browser.execute_script("return document.querySelector('#clients').offsetHeight") > 5000
    assert browser.execute_script(TOO_WIDE) == []
