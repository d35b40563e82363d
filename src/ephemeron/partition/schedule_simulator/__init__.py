"""Exact replay of a placement's schedule: times, links and memory. Shares nothing with the solvers."""
