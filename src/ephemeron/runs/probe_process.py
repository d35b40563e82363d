"""A trial on this machine before a run: a program in a process of its own, with the memory of a function and a time limit."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ephemeron.config import own_processes
from ephemeron.units import MIB

_WATCH_S = 0.02
_WAIT_S = 0.25
"""Seconds between two calls of `on_wait`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """How a trial has ended."""

    ended: Literal["itself", "memory", "time"]
    """`memory`: killed above its quota; `time`: killed at its time limit."""
    output: str
    """Its standard output."""
    last_error: str
    """Last line of its standard error, or its exit code."""


def run_probe(
    program: own_processes.Program,
    *arguments: str,
    cwd: Path,
    most_s: float,
    quota_mb: int = 0,
    python: str = "",
    on_wait: Callable[[float], None] = lambda waited_s: None,
) -> Probed:
    """Runs a program until it ends, or is killed.

    Args:
        program: see `own_processes`.
        arguments: of it.
        cwd: its working folder, which is made.
        most_s: longest time, seconds.
        quota_mb: most resident memory, MiB; 0: any.
        python: interpreter; empty: that of this process.
        on_wait: called several times a second while it runs, with the seconds so far.
    """
    cwd.mkdir(exist_ok=True)
    process = subprocess.Popen(
        own_processes.command(program, *arguments, python=python),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    above = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process, quota_mb, above), daemon=True)
    if quota_mb:
        watcher.start()
    began, late, done = time.monotonic(), False, None
    try:
        while done is None:
            try:
                done = process.communicate(timeout=_WAIT_S)
            except subprocess.TimeoutExpired:
                waited_s = time.monotonic() - began
                if late := waited_s > most_s:
                    process.kill()
                    done = process.communicate()
                on_wait(waited_s)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if quota_mb:
        watcher.join()
    output, errors = done
    (last,) = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    return Probed(ended="memory" if above.is_set() else "time" if late else "itself", output=output, last_error=last)


def _watch(process: subprocess.Popen[str], quota_mb: int, above: threading.Event) -> None:
    """Kills the process once it is above the quota; ends with it."""
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            if watched.memory_info().rss > quota_mb * MIB:
                above.set()
                process.kill()
                return
            try:
                process.wait(_WATCH_S)
            except subprocess.TimeoutExpired:
                continue
    except psutil.Error:
        return  # it has ended
