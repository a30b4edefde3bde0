"""Measurements with a contract: `python -m benchmarks.NAME [--quick] [--json]`."""
