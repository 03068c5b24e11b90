"""A sensor: appends rows to a table, and continues after the last one when it is started again."""

import argparse
import time
from pathlib import Path

import numpy as np

HEADER = "time,a,b,c,d,label\n"


def row(number: int) -> str:
    """Return a row: four numbers, and whether the machine is broken, from row 600 on seen elsewhere."""
    draw = np.random.default_rng(number)
    broken = int(draw.integers(2))
    shift = np.array([2.0, 0.0, -1.0, 0.0] if number < 600 else [0.0, 2.0, 0.0, -1.0])
    values = draw.normal(size=4) + broken * shift
    return f"{number}," + ",".join(f"{value:.4f}" for value in values) + f",{broken}\n"


def main() -> None:
    """Write rows until there are enough."""
    parser = argparse.ArgumentParser(description="Append rows to a table.")
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", type=int, default=1200, help="how many the table has at the end")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two rows")
    given = parser.parse_args()
    with given.table.open("a+") as table:
        table.seek(0)
        lines = sum(1 for _ in table)
        if lines == 0:
            table.write(HEADER)
        for number in range(max(lines - 1, 0), given.rows):
            table.write(row(number))
            table.flush()
            time.sleep(given.pause)


if __name__ == "__main__":
    main()
