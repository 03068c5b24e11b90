"""Benchmarks behind the project's claims: each is a command, is resumable, and writes a small table."""
