"""Search for the cheapest configuration within the limits: space, bounds, branch and bound, Pareto front."""
