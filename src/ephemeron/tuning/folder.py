"""Folder of a study: what makes it outlive its client.

study.toml      the study file as it was read
study.db        Optuna's storage (SQLite), which Optuna's own tools open: all trials, their values and states
study.json      status, for those who watch (`StudyStatus`); replaced as a whole
trials/N        link to the run folder of trial N; a file `end` in it asks the study's client to end the trial
best.toml       job file with the best values
trials.csv, parallel-coordinates.svg, importances.svg
study.lock      held by the client that drives the study
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ephemeron.config.paths import home
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, MissingExtra, UserError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

StudyState = Literal["running", "stopped", "finished", "budget", "deadline"]
"""`budget`, `deadline`: ended because it was spent or reached. `stopped`: by a client, and can be resumed."""
TrialStatus = Literal["waiting", "running", "finished", "pruned", "failed"]

END_FILE = "end"
STATUS_FILE, DATABASE, LOCK_FILE = "study.json", "study.db", "study.lock"
_TRIES, _TRY_EVERY_S = 10, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial in `study.json`."""

    number: int
    state: TrialStatus
    parameters: Mapping[str, object]
    run: str
    """Name of its run."""
    value: float | None = None
    """Metric of the last evaluation so far."""
    evaluations: int = 0
    workers: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    predicted_usd: float | None = None
    predicted_s: float | None = None
    started: bool = False
    """Whether a function was started for it."""
    reason: str = ""
    """Why it was pruned, has failed, or waits."""


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


def studies_folder() -> Path:
    """Folder of all studies that were given no other one. It need not exist."""
    return home() / "studies"


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
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def data_service(self) -> Path:
        """State of the data service that trials share."""
        return self.path / "data-service"

    @property
    def exists(self) -> bool:
        """Whether the study has begun."""
        return (self.path / STATUS_FILE).exists()

    def create(self, text: str, status: StudyStatus) -> None:
        """Makes the files of a new study; its status last.

        Raises:
            JobError: the folder cannot be written.
        """
        try:
            self.trials.mkdir(parents=True, exist_ok=True)
            (self.path / "study.toml").write_text(text)
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
            UserError: another one is, or there can be no such folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise JobError(
                f"cannot make {self.path}: {e.strerror}", remedy="set EPHEMERON_HOME to a folder you can write, or name one: --out"
            ) from None
        with (self.path / LOCK_FILE).open("a+") as file:
            for left in reversed(range(_TRIES)):  # readers hold it for a moment
                try:
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise UserError(
                            f"another client drives the study in {self.path}; watch it with: ephemeron tune STUDY.toml --attach"
                        ) from None
                time.sleep(_TRY_EVERY_S)
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            yield

    @property
    def is_driven(self) -> bool:
        """Whether a client on this machine drives the study."""
        try:
            with (self.path / LOCK_FILE).open("rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def link(self, number: int, run: Path) -> None:
        """Makes `trials/N` the folder of a trial's run."""
        link = self.trials / str(number)
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
