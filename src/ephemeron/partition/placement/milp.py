"""Mixed-integer linear programs, written row by row and solved by SciPy's HiGHS.

Deterministic: the same program with the same limit of branches has the same result; a time limit ends the search at any point.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.errors import MissingExtra
from ephemeron.partition._stdout import silent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of a solver."""

    values: tuple[float, ...] | None
    """By variable; None: no solution was found."""
    value: float
    """Objective; infinite without a solution."""
    bound: float
    """Proved lower bound; minus infinity: none, infinity: there is no solution."""
    nodes: int
    """Number of explored branches."""


@dataclass(slots=True)
class MilpProgram:
    """Minimise cost·x, rows within limits, some variables whole numbers."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, lower: float = 0.0, upper: float = math.inf, *, whole: bool = False, cost: float = 0.0) -> int:
        """Add a variable; its number."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add a row least ≤ Σ terms ≤ most."""
        self.rows.append((dict(terms), least, most))

    def solve(self, *, time_limit_s: float = math.inf, node_limit: int = 10_000_000, gap: float = 1e-6, relaxed: bool = False) -> Solution:
        """Solution of the program.

        Args:
            time_limit_s: of HiGHS.
            node_limit: branches.
            gap: relative gap at which the solver stops.
            relaxed: whole numbers need not be whole.

        Raises:
            MissingExtra: SciPy is not installed.
        """
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise MissingExtra("SciPy, which solves the linear programs of placement,", "partition") from None
        if time_limit_s <= 0:
            return Solution(values=None, value=math.inf, bound=-math.inf, nodes=0)
        starts: list[int] = [0]
        columns: list[int] = []
        numbers: list[float] = []
        for terms, _, _ in self.rows:
            columns.extend(terms.keys())
            numbers.extend(terms.values())
            starts.append(len(columns))
        matrix = csr_array((numbers, columns, starts), shape=(len(self.rows), len(self.cost)))
        options: dict[str, float | int] = {"node_limit": node_limit, "mip_rel_gap": gap}
        if time_limit_s < math.inf:
            options["time_limit"] = time_limit_s
        integrality = np.zeros(len(self.cost)) if relaxed else np.array(self.whole, dtype=int)
        _log.debug("HiGHS starts: %d variables, %d rows", len(self.cost), len(self.rows))
        with silent():
            result = milp(
                np.array(self.cost),
                integrality=integrality,
                bounds=Bounds(np.array(self.lower), np.array(self.upper)),
                constraints=LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows]),
                options=options,
            )
        _log.debug("HiGHS ends: %s", result.message)
        if result.status == 2:
            return Solution(values=None, value=math.inf, bound=math.inf, nodes=0)
        values = None if result.x is None else tuple(float(v) for v in result.x)
        value = math.inf if values is None else float(result.fun)
        proved = getattr(result, "mip_dual_bound", None)
        if integrality.any():
            bound = -math.inf if proved is None or math.isnan(proved) else float(proved)
        else:
            bound = value if result.status == 0 else -math.inf
        return Solution(values=values, value=value, bound=min(bound, value), nodes=int(getattr(result, "mip_node_count", 0) or 0))
