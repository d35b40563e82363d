"""Exact simulation of a placement's schedule: times, links and memory. Shares no code with the solvers."""
