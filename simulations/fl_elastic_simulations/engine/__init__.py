"""Run a scenario: simulated clients, server, time and results."""
