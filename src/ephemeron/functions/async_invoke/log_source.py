"""Whoever besides the channel can tell of calls: what they are billed, and deaths that nobody is left to tell of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """An invocation is over, and this is its bill (on AWS Lambda, a REPORT line)."""

    request: str
    stream: str
    billed_s: float
    size_mb: float
    used_mb: float
    failed: bool = False
    """It says `Status: error` or `Status: timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """An invocation did not come back."""

    request: str
    stream: str
    timed_out: bool
    text: str


class Witness(Protocol):
    """Whoever else can tell of invocations: the bill, and deaths. On AWS Lambda, its logs."""

    problem: str
    """Why it cannot tell; empty as long as it can."""

    async def poll(self) -> list[LogReport | Death]:
        """What is new."""

    async def tail(self, stream: str, request: str) -> list[str]:
        """The last lines of an invocation; none where nobody keeps them."""
