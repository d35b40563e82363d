"""Adversities of `benchmarks.adversity`, one module per area; a case returns, or raises what is wrong.

    @case("text becomes numbers", "header of words that look like numbers")
    def headers() -> None:
        assert csv_names(b"NA,007,1e3\\n") == ["NA", "007", "1e3"]

Cases of one module run in the order of the file, in one process of their own, with a home folder of their own. A module takes
at most 30 s on two quiet cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

CASES: list[Case] = []
"""Cases of the modules that were imported, in the order of their definition."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One adversity."""

    kind: str
    """Kind of fault that it is an example of; a row of the table."""
    name: str
    """What is tried, in a few words."""
    run: Callable[[], None]
    """Raises (usually an AssertionError) where the outcome is wrong."""


def case(kind: str, name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds the decorated function to `CASES`."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        CASES.append(Case(kind, name, run))
        return run

    return add
