"""How a run ended: `result.json` as typed values, and what `attach` and `resume` return."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, RunFailed
from ephemeron.runs.cost import Bill
from ephemeron.runs.folders import RESULT_FILE, RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """`result.json` of a run of any kind. A kind adds fields of its own."""

    run_id: str
    status: str
    """`finished`, `stopped` or `failed`."""
    seconds: float
    cost_usd: float
    platform: str
    invocations: int
    billed: Bill
    budget_usd: float | None
    prices: str
    """Name and date of the price list."""
    causes: tuple[str, ...] = ()
    """Why it has failed, or which limit has stopped it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended."""

    summary: RunSummary
    """Work and cost of the run; `--json` prints it as JSON."""
    folder: RunFolder
    """Files of the run."""
    causes: tuple[str, ...] = ()
    """Why it failed, if it did: one line for each function that failed for good."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its regular end."""
        return self.summary.status == "finished"

    def raise_if_failed(self) -> Self:
        """This result.

        Raises:
            RunFailed: the run failed; has this as its `result`.
        """
        if self.summary.status == "failed":
            raise RunFailed(self.folder.run_id, self.causes, result=self)
        return self

    def returned(self, *, check: bool, interrupted: bool) -> Self:
        """This result, for a caller in Python.

        Args:
            check: raise an error if the run failed.
            interrupted: the caller was interrupted, which has stopped the run.

        Raises:
            RunFailed: see `check`.
            KeyboardInterrupt: the run was stopped by the interrupt, so that what needs its end does not go on.
        """
        if interrupted and self.summary.status == "stopped":
            run = self.folder.run_id
            raise KeyboardInterrupt(f"run {run} was stopped at a checkpoint by an interrupt; go on with: ephemeron.resume({run!r})")
        return self.raise_if_failed() if check else self


def write_summary(folder: RunFolder, summary: RunSummary) -> None:
    """Replaces `result.json` as a whole."""
    folder.write(RESULT_FILE, plain(summary))


def read_summary(folder: RunFolder) -> RunSummary | None:
    """What every kind tells of a run that has ended; None where there is no result that can be read."""
    raw: Mapping[str, Any] = folder.read(RESULT_FILE) or {}
    try:
        return build(RunSummary, {f.name: raw[f.name] for f in fields(RunSummary) if f.name in raw}, where=RESULT_FILE)
    except JobError:
        return None


def copy_results(folder: RunFolder, out: Path | None) -> None:
    """Copies those of result, weights, report and files of the program that exist into a folder."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    kept = [path.name for path in folder.all_kept()]
    for name in (RESULT_FILE, folder.weights.name, *kept, "report.html", "report.png"):
        if (folder.path / name).exists():
            shutil.copy2(folder.path / name, out / name)
    if folder.outputs.exists():
        shutil.copytree(folder.outputs, out / folder.outputs.name, dirs_exist_ok=True)
