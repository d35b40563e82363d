"""Precedence of flags over a job's `[run]` table: values of the table that contradict a flag are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from ephemeron.errors import JobError

MOST_DROPPED = 3


def give_way(
    run: Mapping[str, object], flags: Mapping[str, object], check: Callable[[Mapping[str, object]], object]
) -> tuple[dict[str, object], list[str]]:
    """`run` updated by `flags`, without the smallest set of values of `run` that contradict the flags.

    A table that contradicts itself, and flags that are wrong by themselves, are refused.

    Args:
        run: the job's own table.
        flags: values that were given explicitly.
        check: raises `JobError` for values that contradict each other.

    Returns:
        The values, and the names of those left out.

    Raises:
        JobError: from `check`, with all values.
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


def _refused(check: Callable[[Mapping[str, object]], object], values: Mapping[str, object]) -> bool:
    try:
        check(values)
    except JobError:
        return True
    return False
