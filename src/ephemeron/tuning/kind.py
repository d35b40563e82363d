"""The kind `study`: trials of a job are runs of their own, whose `parent` it is; those of an objective are tasks on functions of the study
itself. What it is and which trials there are is in its folder, so another client goes on with it, a simulated one included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ephemeron.config.toml import parse_toml
from ephemeron.config.typed import build
from ephemeron.errors import JobError, UserError
from ephemeron.events import Event, Note, RunEnded, to_json
from ephemeron.functions.jsonl import Journal
from ephemeron.runs import detached
from ephemeron.runs.client_run import summarized
from ephemeron.runs.cost import Bill
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of, runs_folder
from ephemeron.runs.header import RunHeader, started
from ephemeron.runs.kinds import Following, RunKind
from ephemeron.runs.stop_requests import request_stop
from ephemeron.runs.summary import RunResult, RunSummary, read_summary, write_summary
from ephemeron.tuning import kept, results
from ephemeron.tuning.folder import STUDY_FILE, StudyFolder, StudyState, StudyStatus, TrialRecord, storage_of, written
from ephemeron.tuning.space import FIXED, parameters_of
from ephemeron.tuning.study_file import load_study

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary(RunSummary):
    """`result.json` of a study. It has failed if it is over and no trial has finished."""

    state: StudyState
    metric: str
    best: int | None
    """Number of the best finished trial."""
    best_value: float | None
    trials: Mapping[str, int]
    """Number of trials by state."""


class StudyRuns(RunKind):
    """Studies."""

    simulated_go_on = True

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        for event in events_of(folder):
            following.on_event(event)
        return self.result(folder) or self.resume(folder, header, following)

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        from ephemeron.tuning.study import Study  # imports this module

        with written(folder.path):
            if detached.is_remote(header):
                study = Study(kept.kept(StudyFolder(folder.path)), StudyFolder(folder.path))
            else:
                study = Study.open(_file_of(folder, header), out=folder.path)
            status = study.drive(resume=True, on_event=following.on_event).status
        if self.result(folder) is None:  # its client was killed between its end and its result
            write_summary(folder, summarize(folder, header, status))
        return cast(RunResult, self.result(folder))

    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        request_stop(folder, now=now)

    def result(self, folder: RunFolder) -> RunResult | None:
        try:
            summary = build(StudySummary, folder.read(RESULT_FILE) or {}, where=RESULT_FILE)
        except JobError:
            return None
        return RunResult(summary, folder, summary.causes)

    def pack(self, folder: RunFolder, header: RunHeader) -> None:
        from ephemeron.tuning.study import Study  # imports this module

        study = Study.open(_file_of(folder, header), out=folder.path)
        kept.keep(study.as_sent(header.run_id), StudyFolder(folder.path))

    def bring_home(self, folder: RunFolder, header: RunHeader) -> None:
        """Names the folders of this machine in the job with the best values."""
        study = StudyFolder(folder.path)
        status = study.status()
        best = next((t for t in status.trials if t.number == status.best), None)
        if status.is_of_objective:
            return
        with contextlib.suppress(UserError):  # its files are gone, or have changed
            file = load_study(_file_of(folder, header))
            if best is not None and file.digest == status.digest:
                (folder.path / results.BEST_FILE).write_text(results.best_job(file, status, best))

    def report(self, folder: RunFolder, header: RunHeader, out: Path | None) -> list[Path]:
        study = StudyFolder(folder.path)
        storage = storage_of(study.database)
        import optuna

        place, status, file = out or folder.path, study.status(), folder.path / STUDY_FILE
        place.mkdir(parents=True, exist_ok=True)
        given = parse_toml(file.read_text(), where=str(file))["space"]
        space = parameters_of(given, where=f"{file}: space", fixed=() if status.is_of_objective else FIXED)
        drawn = results.draw(place, space, status, optuna.load_study(study_name=status.name, storage=storage))
        if not drawn:
            raise UserError(f"no trial of study {folder.run_id} has a value yet; watch it with: ephemeron attach {folder.run_id}")
        return drawn

    def figures(self, folder: RunFolder, header: RunHeader) -> dict[str, Any]:
        return {"trials": results.rows(StudyFolder(folder.path).status())}


def _file_of(folder: RunFolder, header: RunHeader) -> str:
    """The study file of a study.

    Raises:
        UserError: it has none.
    """
    file = str(header.payload.get("file", ""))
    if not file:
        raise UserError(f"run {folder.run_id} is a study of a program, and no file: go on with it there")
    return file


class StudyLog:
    """Events of a study that this process drives, from its start to its end.

    Args:
        folder, header: of the study.
        known: its status before.
        on_event: called with each event.
        t: time of its start.
    """

    def __init__(self, folder: RunFolder, header: RunHeader, known: StudyStatus, on_event: Callable[[Event], None], *, t: float) -> None:
        self._folder, self._header, self._metric, self._on_event = folder, header, known.metric, on_event
        self._journal = Journal(folder.events)
        (folder.path / RESULT_FILE).unlink(missing_ok=True)  # of an earlier client, which was stopped
        self._add(started(header, t=t, wall_time=time.time(), notes=known.notes))

    def tell(self, trial: TrialRecord, t: float) -> None:
        """Tells of a trial that has ended."""
        if trial.state not in ("running", "waiting"):
            self._add(Note(t=t, text=results.trial_text(trial, self._metric)))

    def conclude(self, status: StudyStatus, t: float) -> None:
        """Tells of the end, and writes the result."""
        best = next((t for t in status.trials if t.number == status.best), None)
        if best is not None:
            self._add(Note(t=t, text=f"best: {results.trial_text(best, self._metric)}"))
        summary = summarize(self._folder, self._header, status)
        ended: Literal["finished", "stopped", "failed"] = summary.status  # type: ignore[assignment]
        self._add(RunEnded(t=t, status=ended, causes=list(summary.causes)))
        write_summary(self._folder, summary)

    def _add(self, event: Event) -> None:
        self._journal.append(to_json(event))
        self._on_event(event)


def summarize(folder: RunFolder, header: RunHeader, status: StudyStatus) -> StudySummary:
    """Result of a study that has ended or was stopped, from those of its trials."""
    best = next((t for t in status.trials if t.number == status.best), None)
    limits = {"budget": "its budget is spent", "deadline": "its deadline is reached"}
    causes = [limits[status.state]] if status.state in limits else []
    if status.reason:
        causes.append(status.reason)
    if status.over and best is None:
        causes.append("no trial has finished")
    states = [t.state for t in status.trials]
    parts: Sequence[RunSummary] = ()
    if status.is_of_objective:
        parts = [summarized(RunSummary, folder, header, status="stopped")]
    else:
        parts = [part for t in status.trials if (part := read_summary(RunFolder(runs_folder() / t.run))) is not None]
    invocations = sum(part.invocations for part in parts)
    return StudySummary(
        run_id=header.run_id,
        status="stopped" if not status.over else "failed" if best is None else "finished",
        seconds=status.seconds,
        cost_usd=status.spent_usd,
        platform=header.platform,
        invocations=invocations,
        billed=Bill(
            gb_seconds=round(sum(part.billed.gb_seconds for part in parts), 6),
            requests=invocations,
            storage_usd=round(sum(part.billed.storage_usd for part in parts), 9),
        ),
        budget_usd=status.budget_usd,
        prices=f"{header.prices.name}, {header.prices.as_of}",
        causes=tuple(causes),
        state=status.state,
        metric=status.metric,
        best=status.best,
        best_value=None if best is None else best.value,
        trials={state: states.count(state) for state in dict.fromkeys(states)},
    )
