"""Measurements behind the numbers in the documentation. Each module runs by itself: `python -m benchmarks.NAME`."""
