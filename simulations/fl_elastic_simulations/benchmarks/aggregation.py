"""What merging costs a server: CPU time and peak memory, beside Flower's FedAvg."""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.merging_cost import MERGED, MOST_KEPT, merging_cost

__all__ = ["REPLIES", "bench_aggregation"]

REPLIES = (10, 100, 1000)
_REPEATS = 3


def bench_aggregation(results: Results) -> None:
    """Merge replies of a MobileNetV2-sized model, in turn, each run in a process of its own.

    Seconds are CPU time of one aggregation. Peak memory is the process's largest resident set over what it had
    before the first reply, in models of 14 MB. Flower gives its FedAvg all replies at once, so it is handed up
    to a hundred different ones; for a thousand the replies share their bytes and only the time counts.
    """
    for replies in REPLIES:
        if f"{MERGED[0]} | {replies}" in results.rows:
            continue
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in MERGED}
        for _ in range(_REPEATS if replies <= MOST_KEPT else 1):
            for kind in MERGED:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    found[kind].append(pool.submit(merging_cost, kind, replies).result())
        for kind, cells in found.items():
            row = {key: statistics.median(cell[key] for cell in cells) for key in cells[0]}
            kept = kind == MERGED[0] and replies > MOST_KEPT
            if kept:
                del row["peak_models"]
            results.add(f"{kind} | {replies}", row)
