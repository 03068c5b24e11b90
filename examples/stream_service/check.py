"""Read the summary that the service left, and hold it and the store against the table."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from fl_elastic.streaming import SampleStore


def main() -> None:
    """Print what the service learned; fail if a row is missing or was learned twice."""
    table, state = Path(sys.argv[1]), Path(sys.argv[2])
    rows = np.loadtxt(table, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2)
    summary = json.loads((state / "summary.json").read_text())
    with SampleStore(state / "samples.db", capacity_bytes=2**26) as store:
        stored = Counter(tuple(x) for x in store.sample(10**6).x.tolist())
    written = Counter(tuple(x) for x in rows[:, 1:5].tolist())

    print(f"rows in the table:       {len(rows)}")
    print(f"rows that were observed: {summary['observed']}")
    print(f"rows in the store:       {stored.total()} (the rest is held out, to test on)")
    print(f"adaptations:             {summary['adaptations']}, undone: {summary['rolled_back']}")
    print(
        f"accuracy, all rows:      {summary['accuracy']:.3f} (each predicted before it was learned)"
    )
    print(f"accuracy of late:        {summary['prequential_accuracy']:.3f}")
    if summary["observed"] != len(rows) or summary["refused"]:
        sys.exit("rows were lost, learned twice or refused")
    if stored - written:
        sys.exit("the store has a row twice, or one that is not in the table")


if __name__ == "__main__":
    main()
