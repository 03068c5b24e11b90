"""A command that needs neither torch nor Flower does not wait for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_command_line_itself_loads_neither_torch_nor_numpy_nor_flower() -> None:
    script = (
        "import sys, fl_elastic.cli.main; "
        "print([name for name in ('torch', 'numpy', 'flwr', 'plotly', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_help_of_the_laboratory_waits_for_nothing_that_writes_pages(command: str) -> None:
    script = (
        "import sys\nfrom fl_elastic.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in ('plotly', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command, "--help"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Usage" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--version",), "fl-elastic 0.1.0"),
        (("simulate", "/no/such.toml"), "no scenario file"),
        (("plan", "resnet19"), "did you mean 'resnet"),
        (
            (
                "stream",
                "--source",
                "csv:x",
                "--model",
                "small_cn",
                "--input",
                "4",
                "--state-dir",
                "x",
            ),
            "did you mean 'small_cnn'",
        ),
    ],
    ids=["version", "no scenario", "model", "stream"],
)
def test_what_needs_no_torch_is_said_without_it(words: tuple[str, ...], said: str) -> None:
    assert_said_without_torch(words, said)


def assert_said_without_torch(words: tuple[str, ...], *said: str) -> None:
    script = (
        "import sys\nfrom fl_elastic.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print('loaded', 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120
    )
    assert all(each in done.stdout + done.stderr for each in said), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "loaded False"


def test_what_is_wrong_with_a_scenario_is_said_without_torch() -> None:
    demo = Path(__file__).parents[2] / "simulations" / "scenarios" / "demo.toml"
    changes = "fleet.0.device=pi_4", "data.dataset=digit", "model.name=digits_cn"
    given = [word for change in changes for word in ("--set", change)]
    said = "did you mean 'pi_4b'", "did you mean 'digits'", "did you mean 'digits_cnn'"
    assert_said_without_torch(("simulate", str(demo), *given), *said)
