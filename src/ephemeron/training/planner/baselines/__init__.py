"""Searches and equations to compare with; plans rest on none of them.

two_stage   FasDL's two-stage heuristic (algorithms 3.1 and 3.2), and every candidate computed one after the other
published   FasDL's equations 3-1 to 3-29 exactly as published
"""

from __future__ import annotations

from collections.abc import Callable

from ephemeron.training.planner.baselines.two_stage import brute_force, published, two_stage
from ephemeron.training.planner.search.pareto import SearchResult

METHODS: dict[str, Callable[..., SearchResult]] = {"two-stage": two_stage, "brute-force": brute_force}
"""Searches by the names of `ephemeron plan --search`."""

__all__ = ["METHODS", "brute_force", "published", "two_stage"]
