"""Finding the cheapest configuration that meets the limits: the space, the searches, the plan."""

from ephemeron.planning.choose import EXPLICIT, overrides
from ephemeron.planning.plan import Choice, Plan, Predicted, Searched, load_plan, parse_plan
from ephemeron.planning.planner import Wish, make_plan
from ephemeron.planning.search import METHODS
from ephemeron.planning.space import Limits
from ephemeron.units import duration

__all__ = [
    "EXPLICIT",
    "METHODS",
    "Choice",
    "Limits",
    "Plan",
    "Predicted",
    "Searched",
    "Wish",
    "duration",
    "load_plan",
    "make_plan",
    "overrides",
    "parse_plan",
]
