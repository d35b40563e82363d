"""Folder of a study, which is a run of kind `study`: what makes it outlive its client.

run.json, events.jsonl, result.json, driver.lock   as every run has them (`runs.folders`)
study.toml      the study file as it was read
study.db        Optuna's storage (SQLite), which Optuna's own tools open: all trials, their values and states
study.json      status, for those who watch (`StudyStatus`); replaced as a whole
trials/N        link to the run folder of trial N, or an empty folder; a file `end` in it asks the study's client to end the trial
best.toml       job file with the best values; of an objective, these values
trials.csv, parallel-coordinates.svg, importances.svg

It is `HOME/runs/NAME`, so that the study is found again by its file. One in a folder of the user's choice, or of earlier releases
(`HOME/studies/NAME`), has a link there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ephemeron.communication.channels import public_address
from ephemeron.config.paths import home
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.runs.folders import RUN_FILE, TRIALS, RunFolder, runs_folder
from ephemeron.runs.header import RunHeader, open_header, write_header
from ephemeron.runs.lock import driving, is_driven

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

StudyState = Literal["running", "stopped", "finished", "budget", "deadline"]
"""`budget`, `deadline`: ended because it was spent or reached. `stopped`: by a client, and can be resumed."""
TrialStatus = Literal["waiting", "running", "finished", "pruned", "failed"]

END_FILE = "end"
STATUS_FILE, DATABASE, STUDY_FILE, OPTIONS_FILE = "study.json", "study.db", "study.toml", "options.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial in `study.json`."""

    number: int
    state: TrialStatus
    parameters: Mapping[str, object]
    run: str
    """Name of its run; of an objective, of its task."""
    value: float | None = None
    """Metric of the last evaluation so far; of a finished trial of an objective, its result."""
    metrics: Mapping[str, int | float | str] = field(default_factory=dict)
    """What the result of an objective has beside the metric."""
    evaluations: int = 0
    """Values that it has reported."""
    workers: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    predicted_usd: float | None = None
    predicted_s: float | None = None
    started: bool = False
    """Whether a function was started for it."""
    reason: str = ""
    """Why it was pruned, has failed, or waits."""
    traceback: str = ""
    """Of the code of an objective that raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStatus:
    """`study.json`."""

    name: str
    digest: str
    """Of study file and job file."""
    token: str
    """Part of the names of its runs."""
    state: StudyState
    metric: str
    mode: str
    sampler: str
    pruner: str
    job: str
    """File of the job, or name of the objective."""
    parameters: tuple[str, ...]
    """Keys that are searched."""
    trials_planned: int
    concurrency: int
    budget_usd: float | None = None
    deadline_s: float | None = None
    seconds: float = 0.0
    """For which it was driven; virtual ones of a simulated study."""
    spent_usd: float = 0.0
    predicted_usd: float | None = None
    """Of all trials without pruning, before the start."""
    predicted_s: float | None = None
    best: int | None = None
    """Number of the best finished trial."""
    trials: tuple[TrialRecord, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why it was stopped by itself."""
    is_of_objective: bool = False
    """Whether trials are tasks of the study's own functions, and no runs."""

    @property
    def over(self) -> bool:
        """Whether no further trial will begin, and none runs."""
        return self.state in ("finished", "budget", "deadline")


_NOT_WRITABLE = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM})


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, a study is written to a folder.

    Raises:
        JobError: the folder, or its database, cannot be written.
    """
    try:
        yield
        return
    except OSError as e:
        if e.errno not in _NOT_WRITABLE:
            raise
        reason = f"{e.strerror}: {e.filename or path}"
    except Exception as e:
        inner = getattr(e, "orig", None) or getattr(e.__cause__, "orig", None)  # SQLAlchemy's own, or Optuna's around it
        if not isinstance(inner, sqlite3.OperationalError):
            raise
        reason = str(inner)
    raise JobError(
        f"the study in {path} cannot be written: {reason}",
        remedy="make room, or set EPHEMERON_HOME to a folder you can write; a study that has begun goes on with --resume",
    )


def folder_of(name: str) -> StudyFolder:
    """Folder of the study of this name that was given no other one. It need not exist."""
    place = StudyFolder(runs_folder() / name)
    earlier = _of_earlier_releases(name)
    return earlier if earlier.exists and not place.exists else place


def _of_earlier_releases(name: str) -> StudyFolder:
    return StudyFolder(home() / "studies" / name)


def storage_of(path: Path) -> BaseStorage:
    """Optuna's storage in a SQLite file, which is made if absent.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    try:
        from optuna.storages import RDBStorage
    except ModuleNotFoundError:
        raise MissingExtra("Optuna", "tuning") from None
    return RDBStorage(f"sqlite:///{path.absolute()}")


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """One study's files."""

    path: Path

    @property
    def run(self) -> RunFolder:
        """The study as a run, by the name under which it is listed."""
        listed = runs_folder() / str((RunFolder(self.path).read(RUN_FILE) or {}).get("run_id", ""))
        return RunFolder(listed if (listed / RUN_FILE).is_file() and listed.samefile(self.path) else self.path)

    def begin(self, header: RunHeader) -> RunHeader:
        """Writes `run.json` where there is none, and makes the study listed; returns its header.

        Raises:
            JobError: its header is of another release.
        """
        run = RunFolder(self.path)
        if (self.path / RUN_FILE).exists():
            header = open_header(run)
        else:
            write_header(run, header)
        listed = runs_folder() / header.run_id
        if not listed.exists():
            listed.parent.mkdir(parents=True, exist_ok=True)
            listed.unlink(missing_ok=True)
            listed.symlink_to(self.path.resolve(), target_is_directory=True)
        return header

    def new_run_id(self, name: str, token: str) -> str:
        """Name of the study among runs: its own, or, in a folder of the user's choice, one that no other study has."""
        if self.path.absolute().parent == runs_folder().absolute():
            return self.path.name
        is_earlier = self.path == _of_earlier_releases(name).path and not (runs_folder() / name).exists()
        return name if is_earlier else f"{name}-{token}"

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def study_file(self) -> Path:
        """The study file as it was read."""
        return self.path / STUDY_FILE

    @property
    def trials(self) -> Path:
        return self.path / TRIALS

    @property
    def data_service(self) -> Path:
        """State of the data service that trials share."""
        return self.path / "data-service"

    @property
    def exists(self) -> bool:
        """Whether the study has begun."""
        return (self.path / STATUS_FILE).exists()

    def options(self) -> Mapping[str, Any]:
        """Options with which the study has begun, in place of values of its files."""
        return RunFolder(self.path).read(OPTIONS_FILE) or {}

    def create(self, text: str, status: StudyStatus, options: Mapping[str, Any]) -> None:
        """Makes the files of a new study; its status last. An address with a password is not stored.

        Raises:
            JobError: the folder cannot be written.
        """
        try:
            self.trials.mkdir(parents=True, exist_ok=True)
            self.study_file.write_text(text)
            stored = {name: value for name, value in options.items() if name != "channel" or not public_address(value)[1]}
            RunFolder(self.path).write(OPTIONS_FILE, stored)
        except OSError as e:
            raise JobError(f"cannot make {self.path}: {e.strerror}", remedy="give another --out FOLDER") from None
        self.write(status)

    def write(self, status: StudyStatus) -> None:
        """Replaces `study.json` as a whole."""
        part = self.path / f"{STATUS_FILE}.part"
        part.write_text(json.dumps(plain(status), indent=1) + "\n")
        part.replace(self.path / STATUS_FILE)

    def status(self) -> StudyStatus:
        """The latest status.

        Raises:
            UserError: there is none, or it is of another release.
        """
        try:
            raw = json.loads((self.path / STATUS_FILE).read_text())
        except (OSError, ValueError):
            raise UserError(f"there is no study in {self.path}") from None
        return build(StudyStatus, raw, where=str(self.path / STATUS_FILE))

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Makes this process the client that drives the study.

        Raises:
            RunAlreadyDriven: another one is.
            JobError: there can be no such folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise JobError(
                f"cannot make {self.path}: {e.strerror}", remedy="set EPHEMERON_HOME to a folder you can write, or name one: --out"
            ) from None
        with driving(self.run):
            yield

    @property
    def is_driven(self) -> bool:
        """Whether a client on this machine drives the study."""
        return is_driven(self.run)

    def link(self, number: int | str, run: Path) -> None:
        """Makes `trials/N` the folder of a trial's run."""
        link = self.trials / str(number)
        link.parent.mkdir(exist_ok=True)
        if link.is_symlink():
            if link.readlink() == run:
                return
            link.unlink()
        link.symlink_to(run, target_is_directory=True)

    def request_end(self, number: int) -> None:
        """Asks the client to end a trial.

        Raises:
            UserError: the trial has not begun.
        """
        trial = self.trials / str(number)
        if not trial.is_dir():
            raise UserError(f"trial {number} of the study in {self.path} has not begun")
        (trial / END_FILE).touch()

    def end_is_requested(self, number: int) -> bool:
        """Whether a trial is to end."""
        return (self.trials / str(number) / END_FILE).exists()
