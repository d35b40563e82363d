"""Conversion of a plan's choice into a configuration for `train`."""

from __future__ import annotations

from typing import Any

from ephemeron.training.planner.plan import Choice

EXPLICIT = (
    "stages.count",
    "stages.replicas",
    "stages.placement",
    "workers",
    "aggregators",
    "memory_mb",
    "batch_size",
    "nonaggregator_batch_size",
    "pattern",
    "sync",
    "exchange.compression",
)
"""Dotted names of options that say how to run; where a user gives any of them, nothing is planned."""


def overrides(choice: Choice) -> dict[str, Any]:
    """The choice in the names of `Configuration`. The user gives the channel's address."""
    return {
        "workers": choice.workers,
        "aggregators": choice.aggregators,
        "memory_mb": choice.memory_mb,
        "batch_size": choice.batch_size_aggregator,
        "nonaggregator_batch_size": choice.batch_size_nonaggregator,
        "pattern": choice.pattern,
        "sync": choice.sync,
        "exchange": {"compression": choice.compression, "local_steps": choice.local_steps},
    }
