"""Operator graph and devices as values."""
