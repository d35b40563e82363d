"""Which values of a job's `[run]` table give way to a flag that contradicts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from ephemeron.errors import JobError

MOST_DROPPED = 3


def give_way(
    run: Mapping[str, Any], flags: Mapping[str, Any], check: Callable[[dict[str, Any]], object]
) -> tuple[dict[str, Any], list[str]]:
    """`run` under `flags`, without the fewest values of `run` that contradict these.

    A table that contradicts itself, and flags that are wrong by themselves, are refused as ever.

    Args:
        run: the job's own table.
        flags: what the user said now.
        check: raises `JobError` for values that contradict each other.

    Returns:
        The values, and the names of what was left out.

    Raises:
        JobError: of `check`, with all values.
    """
    values = {**run, **flags}
    try:
        check(values)
    except JobError:
        own = [name for name in run if name not in flags]
        if not flags or not own or _refused(check, dict(run)) or _refused(check, dict(flags)):
            raise
        for count in range(1, min(MOST_DROPPED, len(own)) + 1):
            for dropped in combinations(own, count):
                fewer = {name: value for name, value in values.items() if name not in dropped}
                if not _refused(check, fewer):
                    return fewer, list(dropped)
        raise
    return values, []


def _refused(check: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> bool:
    try:
        check(values)
    except JobError:
        return True
    return False
