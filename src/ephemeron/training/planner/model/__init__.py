"""Performance model: profiles, and pure formulas of time, cost and memory, each citing its source."""

from ephemeron.training.planner.model.bounds import iteration_lower_bound_s, round_bound_s

__all__ = ["iteration_lower_bound_s", "round_bound_s"]
