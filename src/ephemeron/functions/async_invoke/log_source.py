"""Log sources: what tells of bills and deaths of invocations, beside the records in the channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """End and bill of an invocation (on AWS Lambda, a REPORT line)."""

    request: str
    stream: str
    billed_s: float
    size_mb: float
    used_mb: float
    failed: bool = False
    """Its status is `error` or `timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """End of an invocation without an outcome."""

    request: str
    stream: str
    timed_out: bool
    text: str


class LogSource(Protocol):
    """Source of bills and deaths. On AWS Lambda, its logs."""

    problem: str
    """Why it cannot be read; empty: it can."""

    async def poll(self) -> list[LogReport | Death]:
        """New reports and deaths."""

    async def tail(self, stream: str, request: str) -> list[str]:
        """The last lines of an invocation; none where they are not kept."""
