"""Labels of a run: names and values by which runs are found, and their cost is told apart, such as `team=vision`.

A label goes to the run's header, to each of its calls, and so into what functions log, and to the runs that are parts of it. Names and
values are what all clouds take for tags, Kubernetes' labels being the strictest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ephemeron.errors import JobError

MOST = 10
"""Labels of a run."""
_NAME = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """The labels, if all of them may be labels.

    Args:
        labels: None: there are none.

    Raises:
        JobError: a name or a value may not, or there are too many; names the first one.
    """
    found = dict(labels or {})
    for name, value in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise JobError(
                f"label {name!r} is no name of a label",
                remedy="use 1 to 63 of a-z, 0-9, '-' and '_', with a letter first and a letter or a digit last",
            )
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise JobError(
                f"label {name}: {value!r} is no value of a label",
                remedy="use 1 to 63 of letters, digits, '-', '_' and '.', with a letter or a digit first and last",
            )
    if len(found) > MOST:
        raise JobError(f"{len(found)} labels are too many", remedy=f"give at most {MOST}")
    return found


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels of the form `NAME=VALUE`.

    Raises:
        JobError: one is not of that form, is given twice, or see `check_labels`.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise JobError(f"label {text!r} has no value", remedy="write NAME=VALUE, such as team=vision")
        if name in found:
            raise JobError(f"label {name} is given twice", remedy="give one value")
        found[name] = value
    return check_labels(found)


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a run with these labels has all that are wanted."""
    return wanted.items() <= labels.items()
