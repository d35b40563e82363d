"""Python objects that a job names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.config.typed import Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Typed):
    """A Python object named `module:name`, and the keyword arguments to call it with."""

    target: str
    """`module:name`, or a plain name where the field allows one."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments."""
