"""Finding the cheapest configuration that meets the limits: the space, the searches, the plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.training.planner.plan import (
        EXPLICIT,
        Choice,
        Plan,
        PlanLimits,
        Predicted,
        SearchReport,
        load_plan,
        overrides,
        parse_plan,
    )
    from ephemeron.training.planner.planner import PlanRequest, make_plan
    from ephemeron.units import duration

_LAZY = {
    "EXPLICIT": "ephemeron.training.planner.plan",
    "overrides": "ephemeron.training.planner.plan",
    "Choice": "ephemeron.training.planner.plan",
    "Plan": "ephemeron.training.planner.plan",
    "Predicted": "ephemeron.training.planner.plan",
    "SearchReport": "ephemeron.training.planner.plan",
    "load_plan": "ephemeron.training.planner.plan",
    "parse_plan": "ephemeron.training.planner.plan",
    "PlanRequest": "ephemeron.training.planner.planner",
    "make_plan": "ephemeron.training.planner.planner",
    "PlanLimits": "ephemeron.training.planner.plan",
    "duration": "ephemeron.units",
}

__all__ = [
    "EXPLICIT",
    "Choice",
    "Plan",
    "PlanLimits",
    "PlanRequest",
    "Predicted",
    "SearchReport",
    "duration",
    "load_plan",
    "make_plan",
    "overrides",
    "parse_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
