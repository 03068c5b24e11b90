"""A command that needs neither torch nor Flower does not wait for them."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_itself_loads_neither_torch_nor_numpy_nor_flower() -> None:
    script = (
        "import sys, fl_elastic.cli.main; "
        "print([name for name in ('torch', 'numpy', 'flwr', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
