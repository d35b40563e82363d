"""Sparse models: a sharded parameter store, and what trains through it."""
