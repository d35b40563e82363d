"""A progress bar of tasks on standard error."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from ephemeron.units import human_count

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """Shows how many tasks are done, and what they cost.

    Args:
        shown: None: if standard error is a terminal.
    """

    def __init__(self, shown: bool | None) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._lock = threading.Lock()

    @property
    def is_shown(self) -> bool:
        """Whether anything is shown."""
        return self._shown

    def show(self, done: int, total: int, cost_usd: float, *, functions: int = 0, note: str = "") -> None:
        """The state now. Any thread.

        Args:
            done, total: tasks.
            cost_usd: so far.
            functions: that run.
            note: more about the work, such as its rate.
        """
        if not self._shown:
            return
        with self._lock:
            if self._bar is None:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

                self._bar = Progress(
                    TextColumn("tasks"),
                    BarColumn(bar_width=28),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[cost]}"),
                    TimeRemainingColumn(),
                    console=Console(stderr=True),
                    transient=True,
                )
                self._bar.start()
                self._task = self._bar.add_task("tasks", total=total, cost="")
            assert self._task is not None
            parts = [f"${cost_usd:.6f}", human_count(functions, "function"), *([note] if note else [])]
            self._bar.update(self._task, completed=done, total=total, cost=" · ".join(parts))

    def stop(self) -> None:
        """Removes it."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar, self._shown = None, False
