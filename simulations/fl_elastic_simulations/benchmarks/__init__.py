"""Measurements behind the claims: each is a command, resumable, and writes a small table."""

from fl_elastic_simulations.benchmarks.aggregation import bench_aggregation
from fl_elastic_simulations.benchmarks.budget import bench_budget
from fl_elastic_simulations.benchmarks.federation import bench_federation
from fl_elastic_simulations.benchmarks.filter import bench_filter
from fl_elastic_simulations.benchmarks.fleet import bench_fleet
from fl_elastic_simulations.benchmarks.memory import bench_memory
from fl_elastic_simulations.benchmarks.poison import bench_poison
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.side_by_side import bench_side_by_side
from fl_elastic_simulations.benchmarks.solver import bench_solver
from fl_elastic_simulations.benchmarks.startup import bench_startup
from fl_elastic_simulations.benchmarks.transfer import bench_transfer
from fl_elastic_simulations.benchmarks.transport import bench_transport

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
