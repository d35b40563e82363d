"""Matrices that are stored as tiles, each an object of any store."""
