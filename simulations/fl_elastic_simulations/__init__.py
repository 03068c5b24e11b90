"""The laboratory beside fl_elastic: simulated federations, rivals, reports and benchmarks."""
