"""Benchmarks whose figures the documentation states. Each module runs by itself: `python -m benchmarks.NAME`."""
