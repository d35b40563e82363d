"""TOML text as tables. Every mistake is one line that names its place."""

from __future__ import annotations

import tomllib
from typing import Any

from ephemeron.errors import JobError


def parse_toml(text: str, *, where: str, remedy: str = "") -> dict[str, Any]:
    """The table in a TOML text.

    Raises:
        JobError: malformed, nested too deep, or with a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise JobError(f"{where} is not valid TOML: brackets are nested too deep", remedy=remedy) from None
    except ValueError as e:  # tomllib's own, and Python's of integers that are too long
        raise JobError(f"{where} is not valid TOML: {str(e).partition(';')[0]}", remedy=remedy) from None
