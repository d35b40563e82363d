"""Placement of operators on devices: baselines, heuristics, exact solvers and bounds (NetSplit, chapter 5)."""
