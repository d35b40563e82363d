"""Metrics as comma-separated values: one line for each step at which something was logged, one column for each metric."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status

METRICS_FILE, PARAMS_FILE = "metrics.csv", "params.json"


class CSVLogger(Logger):
    """`metrics.csv` and `params.json`. A new column makes the file be written anew; columns that a line lacks are empty.

    Args:
        folder: in which a folder for the run is made; None: the run's own folder.
    """

    name = "csv"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._columns: list[str] = ["step"]
        self._file: TextIO | None = None

    def start(self, run: LoggedRun) -> str:
        folder = run.folder if self._folder is None else self._folder / run.run_id
        self._place = folder if run.logged_as is None else Path(run.logged_as)
        self._place.mkdir(parents=True, exist_ok=True)
        self._rewrite(self._columns)
        return str(self._place)

    @property
    def _path(self) -> Path:
        return self._place / METRICS_FILE

    def _rewrite(self, columns: list[str]) -> None:
        """Writes what there is again, without lines that were cut off, with further columns."""
        rows: list[dict[str, str]] = []
        if self._path.exists():
            whole, _, _ = self._path.read_text().rpartition("\n")
            reader = csv.DictReader(io.StringIO(whole, newline=""))
            rows = list(reader)
            columns = list(dict.fromkeys([*(reader.fieldnames or ()), *columns]))
        self._columns = columns
        part = self._path.with_suffix(".part")
        self._close()
        self._file = part.open("w", newline="")
        writer = csv.DictWriter(self._file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        part.replace(self._path)

    def log_params(self, params: Mapping[str, Param]) -> None:
        (self._place / PARAMS_FILE).write_text(json.dumps(params, indent=2) + "\n")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        new = [name for name in metrics if name not in self._columns]
        if new:
            self.save()
            self._rewrite([*self._columns, *new])
        assert self._file is not None
        csv.DictWriter(self._file, self._columns, restval="", lineterminator="\n").writerow({"step": step, **metrics})

    def save(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self, status: Status) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
