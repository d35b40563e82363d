"""Optional solvers, imported on first use."""

from __future__ import annotations

from typing import Any

from ephemeron.errors import MissingExtra


def cp_model() -> Any:
    """CP-SAT of OR-tools.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise MissingExtra("OR-tools, whose CP-SAT orders placed operators,", "partition") from None
    return module
