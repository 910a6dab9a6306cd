"""Benchmarks: `python -m benchmarks.<name>`; the last line printed is one JSON object."""
