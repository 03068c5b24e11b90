"""Measurements behind the claims: each is a command, resumable, and writes a small table."""

from fl_elastic.bench.aggregation import bench_aggregation
from fl_elastic.bench.budget import bench_budget
from fl_elastic.bench.federation import bench_federation
from fl_elastic.bench.filter import bench_filter
from fl_elastic.bench.fleet import bench_fleet
from fl_elastic.bench.memory import bench_memory
from fl_elastic.bench.poison import bench_poison
from fl_elastic.bench.results import Results
from fl_elastic.bench.side_by_side import bench_side_by_side
from fl_elastic.bench.solver import bench_solver
from fl_elastic.bench.startup import bench_startup
from fl_elastic.bench.transfer import bench_transfer
from fl_elastic.bench.transport import bench_transport

__all__ = [
    "Results",
    "bench_aggregation",
    "bench_budget",
    "bench_federation",
    "bench_filter",
    "bench_fleet",
    "bench_memory",
    "bench_poison",
    "bench_side_by_side",
    "bench_solver",
    "bench_startup",
    "bench_transfer",
    "bench_transport",
]
