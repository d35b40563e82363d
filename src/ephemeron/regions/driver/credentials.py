"""Credentials of a group of functions by name: variables of the client's environment that are for this group alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ephemeron.errors import JobError


def variables_of(prefix: str, where: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables by the names that a channel and its functions know.

    Args:
        prefix: beginning of their names, without the underscore that follows it; "": there are none.
        where: whose they are, for errors.
        environment: of the client; None: this process's.

    Raises:
        JobError: there is no variable of such a name.
    """
    if not prefix:
        return {}
    given = os.environ if environment is None else environment
    found = {name.removeprefix(f"{prefix}_"): value for name, value in given.items() if name.startswith(f"{prefix}_")}
    found.pop("", None)
    if not found:
        raise JobError(f"{where}: no environment variable begins with {prefix}_", remedy=f"set them, such as {prefix}_AWS_ACCESS_KEY_ID")
    return found
