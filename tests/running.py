"""Processes that tests look at, which may end at any moment, and conditions that tests wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
LIMIT_S = 240.0
"""Until a condition has clearly not come true, on a machine that is busy with other things, too."""


def until(true: Callable[[], T]) -> T:
    """Asks until it is so."""
    end = time.monotonic() + LIMIT_S
    while not (value := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return value


async def until_async(true: Callable[[], T]) -> T:
    """The same, beside other work."""
    end = time.monotonic() + LIMIT_S
    while not (value := true()):
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)
    return value


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""
