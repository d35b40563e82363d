"""Seeds of randomised schedules, and cases of a matrix: the lanes take some of them, the same in each run, and all are there on request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def seeds(whole: Sequence[T], share: int) -> Sequence[T]:
    """Each `share`-th seed or case; with EPHEMERON_FULL_MATRIX=1 all of them."""
    return whole if os.environ.get("EPHEMERON_FULL_MATRIX") else whole[::share]


def examples(count: int) -> int:
    """Examples of a property that a lane draws: half of `count`; with EPHEMERON_FULL_MATRIX=1 all of them."""
    return count if os.environ.get("EPHEMERON_FULL_MATRIX") else count // 2
