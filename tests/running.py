"""Processes that tests look at, which may end at any moment."""

from __future__ import annotations

import contextlib

import psutil


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""
