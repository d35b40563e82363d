"""What time a training run must take: pure formulas, each citing its source."""

from ephemeron.training.planner.model.bounds import iteration_lower_bound_s, round_bound_s

__all__ = ["iteration_lower_bound_s", "round_bound_s"]
