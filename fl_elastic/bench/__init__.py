"""Measurements behind the claims: each is a command, resumable, and writes a small table."""

from fl_elastic.bench.budget import bench_budget
from fl_elastic.bench.results import Results
from fl_elastic.bench.solver import bench_solver
from fl_elastic.bench.transfer import bench_transfer

__all__ = ["Results", "bench_budget", "bench_solver", "bench_transfer"]
