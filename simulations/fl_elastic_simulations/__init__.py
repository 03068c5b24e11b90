"""The laboratory beside fl_elastic: simulated federations, peers, reports and benchmarks."""
