"""Check that the bundle of a job's code is complete: model, loss and flow are built from it alone, in an empty folder.

The client has files beside the model, other folders on `sys.path` and a working folder. A function has only the bundle. What is
missing from it is reported here, before anything is paid for.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ephemeron.config.code_bundle import Selection, bundle, left_out, unbundle
from ephemeron.config.paths import home
from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import isolated
from ephemeron.errors import EphemeronError, JobError
from ephemeron.training.job import Job, Target

_log = logging.getLogger(__name__)

_NAMED = 5
_ALONE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Objects that the process of a trial builds."""

    model: Target
    loss: Target
    task: Target | None
    seed: int
    dtype: Literal["float32", "float64"]
    folders: tuple[Path, ...]


def bundled(job: Job) -> bytes:
    """Bundle of the job's code.

    Raises:
        JobError: the code is too large, or a pattern matches nothing.
    """
    return bundle(job.code, selection_of(job))


def selection_of(job: Job) -> Selection:
    """Selection of the job's files for its bundle. Training data is excluded: it is sent in another way."""
    apart = () if job.data.path is None or job.data.flow is not None else (job.data.path,)
    return Selection(include=job.code_include, exclude=job.code_exclude, apart=apart, closed=(home(),))


def check_bundle(job: Job, code: bytes) -> None:
    """Builds the model, the loss and the flow from the bundle alone.

    Args:
        code: from `bundled`. Model, loss and flow have been built from the job's own folders.

    Raises:
        JobError: they cannot be built from the bundle; names the files that it leaves out.
    """
    with tempfile.TemporaryDirectory(prefix="ephemeron-trial-") as name:
        place = Path(name).resolve()
        folders = unbundle(code, place / "code")
        try:
            with isolated(place, hidden=job.code):
                _build(job, folders)
            return
        except EphemeronError as e:
            problem = str(e)
            _log.debug("the bundle cannot be built in this process, trying a new one: %s", problem)
        # Code that can be imported only once per process fails there, too: a process of its own decides.
        problem = _alone(job, folders, place) if job.data.flow is None else problem
        if not problem:
            return
    others = left_out(job.code, selection_of(job))
    listed = ", ".join(str(p) for p in others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
    raise JobError(
        f"{'model' if job.task is None else 'task'} {job.program.target} can be built here, but not from the files that are sent to the functions: {problem}",
        remedy=f"files left out: {listed}; name what is needed in code_include"
        if others
        else "put what it needs into a folder of 'code', and open it relative to __file__",
    )


def _build(job: Job, folders: list[Path]) -> None:
    from ephemeron.training.task.program import model_of, task_from

    model_of(task_from(job, folders), job)
    if job.data.flow is not None:
        from ephemeron.data.flow.from_job import find_flow

        find_flow(job.data, seed=job.seed, code=folders)


def _alone(job: Job, folders: list[Path], place: Path) -> str:
    """The problem that a new process has with the bundle; empty: none."""
    wanted = _Trial(model=job.model, loss=job.loss, task=job.task, seed=job.seed, dtype=job.dtype, folders=tuple(folders))
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(plain(wanted)), capture_output=True, text=True, cwd=place / "cwd", timeout=_ALONE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_ALONE_S:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"the process ended with {done.returncode}")


def _main() -> None:
    """Builds what standard input describes; the last line of standard error is the problem."""
    wanted = build(_Trial, json.load(sys.stdin), where="trial")
    job = Job(name="", model=wanted.model, loss=wanted.loss, task=wanted.task, seed=wanted.seed, dtype=wanted.dtype)
    try:
        _build(job, list(wanted.folders))
    except EphemeronError as e:
        sys.exit(" ".join(str(e).split()))


if __name__ == "__main__":
    _main()
