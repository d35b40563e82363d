"""Seeds of randomised schedules: the lanes take some of them, the same in each run, and the whole range is there on request."""

from __future__ import annotations

import os


def seeds(whole: range, share: int) -> range:
    """Each `share`-th seed of a range; with EPHEMERON_FULL_MATRIX=1 all of them."""
    return whole if os.environ.get("EPHEMERON_FULL_MATRIX") else whole[::share]


def examples(count: int) -> int:
    """Examples of a property that a lane draws: half of `count`; with EPHEMERON_FULL_MATRIX=1 all of them."""
    return count if os.environ.get("EPHEMERON_FULL_MATRIX") else count // 2
