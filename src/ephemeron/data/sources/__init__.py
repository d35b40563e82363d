"""Readers of published formats for a job's `data.source`: IDX, CIFAR, NPZ, or the user's own dataset."""
